"""One session over a network that loses, repeats, reorders and damages frames: what comes out is a beginning of what was posted."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpd.core.handoff import Renew
from radixpd.runtime.peer_messages import Sealed, read_body, read_frame, write, write_body
from radixpd.runtime.peer_session import PeerLimits, Rejected, Session
from radixpd.runtime.peer_trust import main_key, session_keys

A, B = b"a" * 16, b"b" * 16
LIMITS = PeerLimits(messages=50)


class End:
    """A session, the frames it has sent and the numbers it has delivered."""

    def __init__(self, *, calling: bool, limits: PeerLimits = LIMITS) -> None:
        keys = session_keys(main_key(None), b"caller", b"door", calling=calling)
        own, theirs = (A, B) if calling else (B, A)
        self.session = Session(keys, own=own, theirs=theirs, now=0.0, limits=limits)
        self.sent: list[bytes] = []
        self.posted = 0
        self.got: list[int] = []
        self.rejected: list[str] = []

    def post(self) -> bool:
        message = Renew(self.posted, 1.0)
        taken = self.session.post(message, write_body(message))
        self.posted += taken
        return taken

    def transmit(self, now: float, room: int = 1000) -> None:
        self.session.transmit(lambda frame: len(self.sent) < room and (self.sent.append(frame) or True), now)

    def take(self, data: bytes, now: float) -> None:
        try:
            frame = read_frame(data)
            assert isinstance(frame, Sealed)
            body = self.session.open(frame, now)
        except (Rejected, msgspec.MsgspecError, AssertionError) as error:
            self.rejected.append(str(error))
            return
        if body is not None:
            message = read_body(body)
            assert isinstance(message, Renew)
            self.got.append(message.room)


def ends(limits: PeerLimits = LIMITS) -> tuple[End, End]:
    return End(calling=True, limits=limits), End(calling=False, limits=limits)


def exchange(one: End, other: End, now: float) -> None:
    for sender, receiver in ((one, other), (other, one)):
        sender.transmit(now)
        for frame in sender.sent:
            receiver.take(frame, now)
        sender.sent.clear()


STEP = st.tuples(
    st.sampled_from(["post", "transmit", "deliver", "drop", "repeat", "swap", "flip", "return", "full", "time"]),
    st.booleans(),
    st.integers(0, 2**16),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=120))
def test_whatever_happens_to_frames_messages_come_once_in_order_unaltered(steps: list[tuple[str, bool, int]]) -> None:
    pair, now = ends(), 0.0
    seen: list[bytes] = []
    for action, side, number in steps:
        end, other = (pair[0], pair[1]) if side else (pair[1], pair[0])
        sent = end.sent
        index = number % len(sent) if sent else 0
        if action == "post":
            end.post()
        elif action == "transmit":
            end.transmit(now)
        elif action == "full":
            end.transmit(now, room=len(sent) + number % 2)
        elif action == "time":
            now += number % 30 / 10
        elif action == "return" and seen:
            other.take(seen[number % len(seen)], now)
        elif not sent:
            continue
        elif action == "deliver":
            seen.append(sent[0])
            other.take(sent.pop(0), now)
        elif action == "drop":
            del sent[index]
        elif action == "repeat":
            sent.append(sent[index])
        elif action == "swap":
            sent[0], sent[index] = sent[index], sent[0]
        elif action == "flip":
            damaged = bytearray(sent[index])
            damaged[number // 8 % len(damaged)] ^= 1 << number % 8
            sent[index] = bytes(damaged)
        for each in pair:
            assert each.got == list(range(len(each.got)))
    # The network heals: the rest comes.
    for end in pair:
        end.sent.clear()
    for _ in range(4):
        now += 1.1
        exchange(*pair, now)
    assert pair[0].got == list(range(pair[1].posted))
    assert pair[1].got == list(range(pair[0].posted))
    assert not pair[0].session.unacknowledged
    assert not pair[1].session.unacknowledged


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_flipped_bit_passes(data: st.DataObject) -> None:
    one, other = ends()
    one.post()
    one.transmit(0.0)
    (frame,) = one.sent
    damaged = bytearray(frame)
    for place in data.draw(st.sets(st.integers(0, 8 * len(frame) - 1), min_size=1, max_size=4)):
        damaged[place // 8] ^= 1 << place % 8
    other.take(bytes(damaged), 0.0)
    assert other.got == []
    assert len(other.rejected) == 1
    other.take(frame, 0.0)
    assert other.got == [0]


def rejection(end: End, frame: bytes) -> str:
    before = end.got.copy()
    end.take(frame, 0.0)
    assert end.got == before
    return end.rejected[-1]


def test_each_kind_of_wrong_frame_has_its_own_reason() -> None:
    one, other = ends()
    for _ in range(3):
        one.post()
    one.transmit(0.0)
    first, second, third = one.sent
    other.take(first, 0.0)
    assert rejection(other, first) == "replayed"
    other.take(third, 0.0)
    assert other.rejected[-1] == "gap"
    assert rejection(other, second) == "replayed", "no going back, even where it would fit"
    frame = read_frame(third)
    assert isinstance(frame, Sealed)
    assert rejection(other, write(msgspec.structs.replace(frame, incarnation=B))) == "incarnation"
    assert rejection(other, write(msgspec.structs.replace(frame, counter=99))) == "mac"
    assert rejection(other, write(msgspec.structs.replace(frame, ack=1))) == "mac"
    assert rejection(other, write(msgspec.structs.replace(frame, number=2))) == "mac"
    assert rejection(other, write(msgspec.structs.replace(frame, body=b"x"))) == "mac"
    assert rejection(one, third) == "incarnation", "what one has said does not come back to it"


def test_a_key_of_one_direction_or_session_opens_no_other() -> None:
    one, _ = ends()
    one.post()
    one.transmit(0.0)
    strange = Session(session_keys(main_key(None), b"caller", b"door2", calling=False), own=B, theirs=A, now=0.0, limits=LIMITS)
    mirrored = Session(session_keys(main_key(None), b"caller", b"door", calling=True), own=B, theirs=A, now=0.0, limits=LIMITS)
    frame = read_frame(one.sent[0])
    assert isinstance(frame, Sealed)
    for session in (strange, mirrored):
        with pytest.raises(Rejected, match="mac"):
            session.open(frame, 0.0)


def test_a_replayed_heartbeat_does_not_count_as_life() -> None:
    one, other = ends()
    one.transmit(0.0)
    (beat,) = one.sent
    other.take(beat, 1.0)
    assert other.session.heard == 1.0
    other.take(beat, 9.0)
    assert other.session.heard == 1.0


def test_a_heartbeat_goes_out_only_when_nothing_else_did() -> None:
    one, _ = ends()
    one.transmit(0.0)
    one.transmit(0.5)
    assert len(one.sent) == 1
    one.post()
    one.transmit(0.9)
    one.transmit(1.5)
    assert len(one.sent) == 2
    one.transmit(1.95)
    assert len(one.sent) == 3


def test_a_silent_peer_gets_nothing_twice_and_a_loss_is_made_good_under_load() -> None:
    one, other = ends()
    one.post()
    one.transmit(0.0)
    one.sent.clear()  # lost
    for tenth in range(1, 100):
        one.transmit(tenth / 10)
    assert all(isinstance(frame := read_frame(data), Sealed) and frame.number == 0 for data in one.sent)
    one.sent.clear()
    for tenth in range(100, 130):
        one.post()
        exchange(one, other, tenth / 10)
    assert other.got == list(range(len(other.got)))
    assert len(other.got) >= 10, "new messages do not hold up the old ones"


def test_what_is_sent_again_though_it_came_is_not_delivered_again() -> None:
    one, other = ends()
    other.transmit(0.0)
    (late,) = other.sent  # a heartbeat that knows of no message, and is long under way
    one.post()
    one.transmit(0.0)
    other.take(one.sent.pop(), 0.0)
    one.take(late, 5.0)
    one.transmit(5.0)
    other.take(one.sent.pop(), 5.0)
    assert other.got == [0]
    assert other.rejected == ["repeated"]


def test_many_messages_are_acknowledged_before_the_next_heartbeat() -> None:
    limits = PeerLimits(messages=100)
    one, other = ends(limits)
    exchange(one, other, 0.0)
    for _ in range(10):
        while one.post():
            pass
        exchange(one, other, 0.1)
    assert len(other.got) == 1000


def test_the_queue_is_bounded_by_number_and_by_bytes() -> None:
    one, _ = ends()
    assert sum(one.post() for _ in range(60)) == 50
    few, _ = ends(PeerLimits(kept_bytes=len(write_body(Renew(0, 1.0))) * 3))
    assert sum(few.post() for _ in range(60)) == 3
