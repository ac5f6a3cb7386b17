"""The two legs of a handoff: what a prefill server (`Outgoing`) and a decode server (`Incoming`) know of one room.

Records that the roles keep and change; what is said here is derived from them. Called by `prefill_role` and `decode_role`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from radixpd.core.handoff import Arrived, Reserve, Room
from radixpd.core.page_hash import prompt_digest
from radixpd.core.request import Phase, Request
from radixpd.core.step import TokenLogprobs
from radixpd.core.whereabouts import OWN_MOVER, OWN_POOL, OWN_QUEUE, RUNNER, Part, Stage

__all__ = ["Incoming", "Outgoing"]


@dataclass(slots=True, eq=False)
class Outgoing:
    """One room of a prefill server, known `since`. Decode has the first `had` pages of the prompt; plans have sent those up to `sent`."""

    room: int
    since: float
    deadline: float
    request: Request | None = None
    peer: str = ""
    reserve: Reserve | None = None
    had: int = 0
    sent: int = 0
    tickets: set[int] = field(default_factory=set)
    tokens: dict[int, tuple[int, TokenLogprobs | None]] = field(default_factory=dict)  # by sample
    unneeded: bool = False
    arrived: bool = False
    trouble: str = ""  # why the transfer has failed; decode has been told, and may have ended the room before
    first_sent: float = 0.0  # when the mover was given the first page
    sampled: float = 0.0  # when decode was told the first tokens

    @property
    def sending(self) -> bool:
        """Whether any page has been handed to the mover."""
        return self.sent > self.had

    def mismatch(self, page_size: int) -> str:
        """What is wrong with the reservation, once body and reservation are here; empty if nothing is."""
        assert self.request is not None
        assert self.reserve is not None
        request, reserve = self.request, self.reserve
        length = request.prompt_length
        if reserve.prompt_tokens != length:
            return f"the prompt has {length} tokens on the prefill server and {reserve.prompt_tokens} on the decode server"
        if reserve.digest != prompt_digest(request.tokens):
            return "the prompt differs from that on the decode server: two requests seem to name one bootstrap_room"
        pages = -(-length // page_size) - reserve.skip // page_size
        if reserve.skip % page_size or not 0 <= reserve.skip < length or len(reserve.pages) != pages:
            return f"{len(reserve.pages)} pages reserved behind {reserve.skip} tokens, where {pages} are needed"
        return ""

    def promise(self) -> None:
        """From now on the pages of the prompt belong to the handoff as well; first tokens are drawn as decode draws the others."""
        assert self.request is not None
        assert self.reserve is not None
        self.request.read_by_peer = True
        params = replace(self.request.params, seed=self.reserve.seed)
        for each in self.request.samples:
            each.params, each.trail.skip = params, self.reserve.skip

    def stages(self) -> Iterator[Stage]:
        """Where it stands: once for the room, but for each sample once they are done here."""
        request = self.request
        if request is None:
            yield self._stage("awaiting_body", self.since, "request", None)
        elif self.reserve is None:
            yield self._stage("awaiting_reserve", self.since, self.peer or "decode server", request)
        elif self.arrived:
            for each in request.samples:
                yield self._stage("sending", self.sampled, OWN_MOVER, each)
        elif request.phase is Phase.WAITING:
            yield self._stage("queued", request.since, OWN_QUEUE, request)
        else:
            yield self._stage("prefill", request.since, RUNNER, request)

    def _stage(self, part: Part, since: float, waits_for: str, request: Request | None) -> Stage:
        return Stage(part=part, since=since, waits_for=waits_for, room=self.room, request=request, peer=self.peer)


@dataclass(slots=True, eq=False)
class Incoming:
    """One room of a decode server. `since`: when the wait under way began; `skip`: prompt tokens that were here already; -1 before pages
    are reserved."""

    room: Room
    request: Request
    since: float
    skip: int = -1
    after: int = 0  # steps up to this one may still write into the reserved pages, for whoever had them before
    asked: bool = False
    renewed: float = 0.0
    message: Arrived | None = None
    told: float = 0.0  # when the message came
    landed: float | None = None  # when the last byte was here

    @property
    def reserved(self) -> bool:
        """Whether the request holds its pages."""
        return self.skip >= 0

    @property
    def owed(self) -> int:
        """Prompt tokens that the peer is to deliver."""
        return self.request.prompt_length - self.skip if self.reserved else 0

    def stage(self, waits_for: str = OWN_POOL) -> Stage:
        """Where it stands. `waits_for`: whom, as long as it has no pages."""
        part, since = self._part()
        whom = waits_for if part == "reserving" else RUNNER if part == "reserved" else self.room.peer
        return Stage(part=part, since=since, waits_for=whom, room=self.room.number, request=self.request, peer=self.room.peer)

    def _part(self) -> tuple[Part, float]:
        if not self.reserved:
            return "reserving", self.since
        if not self.asked:
            return "reserved", self.since
        if self.message is not None:
            return "arrived", self.told
        return ("receiving", self.since) if self.landed is None else ("landed", self.landed)
