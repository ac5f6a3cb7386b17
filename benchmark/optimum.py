"""The most that a prefix cache could have found: a trie of all token ids that a server was sent and wrote, in pages.

The cache behind it is ideal: it holds everything for ever, a prompt from the moment at which it was sent, an output from its end on. A
match is whole pages and never the whole prompt, since one token must be computed to get an answer. Called by `bench_programs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Exchange", "optimal"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One prompt, its output, and how many of the prompt's tokens the server found cached. `hint`: nobody wanted its answer."""

    prompt: Sequence[int]
    output: Sequence[int]
    cached: int
    began: float
    ended: float
    hint: bool = False


def optimal(exchanges: Sequence[Exchange], page: int) -> list[int]:
    """For each exchange the tokens of its prompt that an ideal cache would have found."""
    found = [0] * len(exchanges)
    events = [(each.began, 0, index) for index, each in enumerate(exchanges)] + [
        (each.ended, 1, index) for index, each in enumerate(exchanges)
    ]
    root: dict[tuple[int, ...], Any] = {}
    for _, is_end, index in sorted(events):
        each = exchanges[index]
        if is_end:
            # The last token's KV is never computed: nothing came after it.
            _walk(root, [*each.prompt, *each.output][: len(each.prompt) + len(each.output) - 1], page)
        else:
            found[index] = min(_walk(root, each.prompt, page), (len(each.prompt) - 1) // page * page)
    return found


def _walk(root: dict[tuple[int, ...], Any], ids: Sequence[int], page: int) -> int:
    """Insert the whole pages of `ids`; how many tokens were there before."""
    node, known, matched = root, True, 0
    for start in range(0, len(ids) - page + 1, page):
        key = tuple(ids[start : start + page])
        known = known and key in node
        matched += page if known else 0
        node = node.setdefault(key, {})
    return matched
