"""What a worker says about its load: ours in one shape, other servers' in SGLang's.

Invariant: whatever a worker answers, reading it never fails, and its figures can be reckoned with; what is not there is zero, which means
unknown. Pure; called by `fleet`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

__all__ = ["Count", "LoadReport", "read_load"]

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # JSON has numbers of any length: a longer one would not be a float any more


class _Load(msgspec.Struct):
    """`/get_load` of ours and of SGLang's, which is a list of these, one for each data-parallel rank."""

    running: Count = 0
    waiting: Count = 0
    parked: Count = 0
    max_running: Count = 0
    pages: Count = 0
    free_pages: Count = 0
    tree_pages: Count = 0
    locked_pages: Count = 0
    page_size: Count = 0
    steps_total: Count = 0
    num_reqs: Count = 0  # SGLang: running and waiting
    num_waiting_reqs: Count = 0
    incarnation: str = ""
    role: str = ""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Requests and tokens. `incarnation` names the process, `role` what it does; of servers that do not say, `steps`, computed in its life,
    tell a new process from an old one."""

    running: int = 0
    waiting: int = 0
    max_running: int = 0
    kv_tokens: int = 0
    free_tokens: int = 0
    steps: int = 0
    incarnation: str = ""
    role: str = ""

    def by_another_than(self, before: LoadReport) -> bool:
        """Whether another process than the one before reports."""
        if self.incarnation and before.incarnation:
            return self.incarnation != before.incarnation
        return self.steps < before.steps


_DECODER = msgspec.json.Decoder(list[_Load] | _Load)


def read_load(body: bytes) -> LoadReport:
    """The report in an answer to `/get_load`; an empty one if it is something else."""
    try:
        found = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return LoadReport()
    ranks = found if isinstance(found, list) else [found]
    return LoadReport(
        running=sum(rank.running + max(0, rank.num_reqs - rank.num_waiting_reqs) for rank in ranks),
        waiting=sum(rank.waiting + rank.parked + rank.num_waiting_reqs for rank in ranks),
        max_running=sum(rank.max_running for rank in ranks),
        kv_tokens=sum(rank.pages * rank.page_size for rank in ranks),
        free_tokens=sum((rank.free_pages + rank.tree_pages - rank.locked_pages) * rank.page_size for rank in ranks),
        steps=sum(rank.steps_total for rank in ranks),
        incarnation="".join(rank.incarnation for rank in ranks),
        role=ranks[0].role if ranks else "",
    )
