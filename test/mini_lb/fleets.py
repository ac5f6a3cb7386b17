"""Workers of every kind, for property tests of the policies."""

from __future__ import annotations

from hypothesis import strategies as st

from radixpd.mini_lb.snapshot import DecodeModel, Hits, PrefillModel, WorkerSnapshot

__all__ = ["FLEET", "WORKER"]

WORKER = st.builds(
    WorkerSnapshot,
    name=st.sampled_from(["a", "b", "c", "d", "e"]),
    usable=st.booleans(),
    in_flight=st.integers(0, 500),
    max_running=st.integers(0, 64),
    kv_tokens=st.integers(0, 10**6),
    queued_tokens=st.integers(0, 10**6),
    queued_s=st.floats(0, 100),
    used_tokens=st.integers(0, 10**6),
    recent_s=st.floats(0, 1000),
    room_tokens=st.none() | st.integers(-1000, 10**6),
    idle_s=st.floats(0, 1e4),
    hits=st.builds(Hits, st.integers(0, 2000), st.integers(0, 2000), st.booleans()),
    prefill=st.builds(PrefillModel, st.floats(0, 1), st.floats(0, 0.01), st.floats(0, 1e-6)),
    decode=st.builds(DecodeModel, st.floats(0, 1), st.floats(0, 0.01), st.floats(0, 1e-4)),
)
FLEET = st.lists(WORKER, min_size=1, max_size=5, unique_by=lambda worker: worker.name)
