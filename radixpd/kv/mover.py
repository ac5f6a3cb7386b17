"""The mover: one thread beside the forward that owns all transports and carries what plans say, layer by layer, first layer first.

The runner hands over sends (`begin`) and the word that a layer is computed (`layer_done`), the brain its orders, and none of them ever
waits; whatever happens comes back through `report`, called on the mover's thread. Invariants: every ticket gets exactly one `TicketDone`,
every cancelled room that is sent from here one `Quiet`; a frame whose room was cancelled, or whose ticket has failed, before its bytes had
left does not count at the receiver; nothing that fails ends the thread.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from radixpd.core.handoff import CancelRoom, ExpectRoom, Landed, MoverOrder, MoverReport, Quiet, TicketDone
from radixpd.core.step import Send
from radixpd.errors import PeerFailed
from radixpd.kv.arrivals import Arrivals
from radixpd.kv.codec_choice import NONE, carriers
from radixpd.kv.coding import Coding, Decoder
from radixpd.kv.dispatch import Dispatch
from radixpd.kv.link import Link
from radixpd.kv.outbox import Job, Lane, Piece
from radixpd.kv.pool import Pool
from radixpd.kv.transport import Counters, Endpoint, Finished, Ground, KVTransport, News, TransportOptions, choose, create

__all__ = ["Mover", "MoverOptions"]

logger = logging.getLogger(__name__)

LOOK = 0.05  # seconds between two looks at deadlines
ENDED = 240.0  # seconds that a cancelled room is remembered; plans that were under way may still name it


@dataclass(frozen=True, slots=True)
class MoverOptions:
    """`link_gbps`: pace everything to this (0: no limit); `stall`: seconds without progress after which open sends to a peer fail;
    `codec`: what is sent may be compressed so, and what comes too (see `codec_choice`)."""

    backends: tuple[str, ...] = ("shm", "tcp")
    link_gbps: float = 0.0
    stall: float = 20.0
    transport: TransportOptions = field(default_factory=TransportOptions)
    codec: str = NONE


class Mover:
    """Of one runner and its pool. Raises ConfigError when a transport cannot start, or cannot carry what the codec makes."""

    def __init__(
        self,
        pool: Pool,
        report: Callable[[MoverReport], None],
        options: MoverOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._report, self._clock = pool, report, clock
        self._options = options or MoverOptions()
        self._layers, self._page_bytes = pool.layout.layers, pool.layout.page_bytes
        self._selector = selectors.DefaultSelector()
        self._ended: dict[int, float] = {}  # rooms whose source pages may be given up, since when; written by both threads
        self._coding = Coding(pool, self._options.codec)
        arrivals = Arrivals(self._layers, self._page_bytes)
        self._ground = Ground(self._selector, arrivals, self._ended, self._options.transport, clock)
        self._ground.decoder = Decoder(self._coding) if self._coding.codecs else None
        self._ways: dict[str, KVTransport] = {}  # peer -> how it is reached
        self._troubles: dict[str, str] = {}  # peer -> why it is not reached
        link = Link(self._options.link_gbps, clock)
        self._dispatch = Dispatch(link, self._coding, self._ways, fail=self._fail, clock=clock)
        self._computing: list[Job] = []  # jobs of the step that runs now, with pages that it computes
        self._inputs: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not earlier: other threads may be about to write to it, and its number could be somebody else's by then.
        weakref.finalize(self, os.close, self._wake)
        self._asleep = False
        self._wanted = False  # whether the running step has layers that somebody waits for
        self._stop = False
        self._selector.register(self._wake, selectors.EVENT_READ, self._awake)
        self._transports: dict[str, KVTransport] = {}
        try:
            opened = []
            for name in self._options.backends:
                carriers(name, self._options.codec)
                self._transports[name] = create(name, self._ground)
                opened.append(self._transports[name].open(pool.layout, pool))
            self.endpoints: tuple[Endpoint, ...] = tuple(opened)
        except BaseException:
            self._let_go()
            raise
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)
        self._thread.start()

    # ---- called from other threads ------------------------------------------------------------------------------------------------

    def begin(self, sends: Sequence[Send]) -> None:
        """A step starts; these are its sends. Also ends the step before, whose layers are all done or will never be."""
        if not sends and not self._wanted:
            return
        self._wanted = any(send.ready < len(send.source) for send in sends)
        self._put(lambda: self._begin(tuple(sends)))

    def layer_done(self, layer: int) -> None:
        """The forward has written this layer's KV of the step. A few microseconds."""
        if self._wanted:
            self._put(lambda: self._layer(layer))

    def order(self, order: MoverOrder) -> None:
        """What the brain wants."""
        if isinstance(order, CancelRoom):
            # At once: the pages may be given to somebody else before the mover's thread gets to it.
            self._ended[order.room] = self._clock()
        self._put(lambda: self._obey(order))

    def connect(self, peer: str, offered: tuple[Endpoint, ...], token: bytes) -> None:
        """Know where to write for a peer: at the best of its endpoints. A failure is told by its tickets."""
        self._put(lambda: self._connect(peer, offered, token))

    def admit(self, peer: str, token: bytes) -> None:
        """Let a peer write here (what `ExpectRoom` permits)."""
        self._put(lambda: self._admit(peer, token))

    def disconnect(self, peer: str) -> None:
        """Neither write there nor let it write here any more. What proves that it cannot is told as `PeerLost`."""
        self._put(lambda: self._disconnect(peer))

    def void(self, rooms: Iterable[int]) -> None:
        """The pages that these rooms are sent from may change from now on: nothing of them counts any more."""
        for room in rooms:
            self._ended[room] = self._clock()

    def after(self, act: Callable[[], None]) -> None:
        """Call `act`, on the mover's thread, when everything asked so far is done and reported."""
        self._put(act)

    @property
    def counters(self) -> Counters:
        """Read only."""
        return self._ground.counters

    def close(self, timeout: float = 5.0) -> bool:
        """Stop: open tickets fail, peers are told. False if the thread has not ended in time."""
        self._stop = True
        self._put(lambda: None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _put(self, act: Callable[[], None]) -> None:
        self._inputs.append(act)
        if self._asleep:  # else it looks again before it sleeps; a system call could cost the caller its turn
            self._asleep = False
            os.eventfd_write(self._wake, 1)

    # ---- the thread -----------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop:
                self._guarded(self._round)
            for lane in self._dispatch.lanes.values():
                self._fail_all(lane, "this server is closing")
        finally:
            self._let_go()

    def _round(self) -> None:
        """Wait for something, then do all there is to do."""
        timeout = self._timeout()
        self._asleep = True
        events = self._selector.select(0 if self._inputs else timeout)
        self._asleep = False
        for key, mask in events:
            self._guarded(lambda key=key, mask=mask: key.data(mask))  # type: ignore[misc]
        while self._inputs:
            self._guarded(self._inputs.popleft())
        self._ground.nap = LOOK
        for transport in self._transports.values():
            self._guarded(lambda transport=transport: self._listen(transport))  # type: ignore[misc]
        self._guarded(self._dispatch.work)
        self._guarded(self._look)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # this thread serves every room; one that fails must not take the others along
            logger.exception("the mover met a fault")

    def _timeout(self) -> float:
        return min(LOOK, self._ground.nap, self._dispatch.wait)

    def _awake(self, mask: int) -> None:
        os.eventfd_read(self._wake)

    def _tell(self, report: MoverReport) -> None:
        self._guarded(lambda: self._report(report))

    # ---- inputs ---------------------------------------------------------------------------------------------------------------------

    def _begin(self, sends: tuple[Send, ...]) -> None:
        for job in self._computing:
            self._fail(job, "the step ended before all its layers were computed")
        self._computing = []
        for send in sends:
            self._accept(send)

    def _accept(self, send: Send) -> None:
        job = Job(send, self._layers * len(send.source))
        problem = ""
        if send.room in self._ended:
            problem = "the room was cancelled"
        elif send.peer not in self._ways:
            problem = self._troubles.get(send.peer, f"there is no connection to {send.peer}")
        elif len(send.source) != len(send.target):
            problem = f"{len(send.source)} pages for {len(send.target)} places"
        if problem or not job.left:
            self._settle(job, problem)
            return
        self._dispatch.add(job)
        for layer in range(self._layers):
            self._dispatch.due(Piece(job, layer, 0, min(send.ready, len(send.source))))
        if send.ready < len(send.source):
            self._computing.append(job)

    def _layer(self, layer: int) -> None:
        for job in self._computing:
            if not job.settled:
                self._dispatch.due(Piece(job, layer, job.send.ready, len(job.send.source)))
        if layer == self._layers - 1:
            self._computing = []

    def _obey(self, order: MoverOrder) -> None:
        arrivals = self._ground.arrivals
        match order:
            case ExpectRoom(room, peer, pages):
                if len(pages):
                    arrivals.expect(room, peer, pages)
                else:
                    self._tell(Landed(room))
            case CancelRoom(room):
                writer = arrivals.writer(room)
                arrivals.end(room)
                if writer is None:
                    self._cancel(room)
                elif not any(transport.may_write(writer) for transport in self._transports.values()):
                    self._tell(Quiet(room))

    def _cancel(self, room: int) -> None:
        self._ended[room] = self._clock()
        for lane in self._dispatch.lanes.values():
            for job in [each for each in lane.jobs if each.send.room == room]:
                self._fail(job, "the room was cancelled")
        answers = [transport.cancel(room) for transport in self._transports.values()]  # every one is asked
        if all(answers):
            self._tell(Quiet(room))

    def _connect(self, peer: str, offered: tuple[Endpoint, ...], token: bytes) -> None:
        self._troubles.pop(peer, None)
        try:
            endpoint = choose(offered, tuple(self._transports))
            self._transports[endpoint.transport].meet(peer, token, endpoint)
        except PeerFailed as error:
            logger.error("%s cannot be written to: %s", peer, error)
            self._troubles[peer] = f"{peer} cannot be written to: {error}"
            self._ways.pop(peer, None)
            return
        self._ways[peer] = self._transports[endpoint.transport]
        self._dispatch.know(peer)

    def _admit(self, peer: str, token: bytes) -> None:
        for transport in self._transports.values():
            transport.meet(peer, token, None)

    def _disconnect(self, peer: str) -> None:
        if (lane := self._dispatch.lanes.get(peer)) is not None:
            self._fail_all(lane, f"{peer} is not served any more")
        self._ways.pop(peer, None)
        self._troubles.pop(peer, None)
        for transport in self._transports.values():
            transport.part(peer)
            self._listen(transport)  # what that has proven, before anything else is done

    # ---- news -----------------------------------------------------------------------------------------------------------------------

    def _listen(self, transport: KVTransport) -> None:
        for news in transport.poll():
            self._hear(news)

    def _hear(self, news: News) -> None:
        if not isinstance(news, Finished):
            self._tell(news)
            return
        parcel = self._dispatch.answered(news.number, arrived=not news.error)
        if parcel is None:
            return
        piece, job = parcel.piece, parcel.piece.job
        if news.error:
            self._fail(job, f"{news.error} (sent as {job.codec})" if parcel.coded else news.error)
            return
        job.left -= piece.end - piece.start
        if not job.left:
            self._settle(job, "")

    def _fail(self, job: Job, reason: str) -> None:
        # First: with the report its pages may be given up, and what is on the way of them must not count.
        if not job.settled:
            self._ended.setdefault(job.send.room, self._clock())
            self._settle(job, reason)

    def _fail_all(self, lane: Lane, reason: str) -> None:
        for job in list(lane.jobs):
            self._fail(job, reason)

    def _settle(self, job: Job, error: str) -> None:
        if job.settled:
            return
        job.settled = True
        lane = self._dispatch.lanes.get(job.send.peer)
        if lane is not None and job in lane.jobs:
            lane.jobs.remove(job)
        self._tell(TicketDone(job.send.ticket, error))

    def _look(self) -> None:
        """Peers that take nothing any more; rooms that need not be remembered."""
        now = self._clock()
        for lane in self._dispatch.lanes.values():
            if lane.jobs and (lane.flying or lane.has_due) and now - lane.moved > self._options.stall:
                self._fail_all(lane, f"{lane.peer} has taken nothing for {self._options.stall:g} s")
        for room in [room for room, since in list(self._ended.items())[:16] if now - since > ENDED]:
            self._ended.pop(room, None)

    def _let_go(self) -> None:
        """Close what is open."""
        for transport in self._transports.values():
            self._guarded(transport.close)
        self._selector.close()
