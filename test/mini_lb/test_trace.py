"""Traces: the generator behaves like the published one, and files that do not fit are refused by name."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest

from radixpd.errors import ConfigError
from radixpd.mini_lb.trace import BLOCK_TOKENS, Arrival, generate, read, write

PUBLISHED = Path(__file__).parents[3] / "shared/data/mooncake_conversation_trace.jsonl"


def _hit_rate(arrivals: list[Arrival], blocks: int) -> float:
    """Of one LRU cache of so many blocks, tails evicted first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = asked = 0
    for arrival in arrivals:
        hits += next((at for at, block in enumerate(arrival.blocks) if block not in cache), len(arrival.blocks))
        asked += len(arrival.blocks)
        for block in reversed(arrival.blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return hits / asked


def _check(arrivals: list[Arrival]) -> None:
    assert sum(len(each.blocks) for each in arrivals) / len(arrivals) == pytest.approx(24.0, rel=0.05)
    assert _hit_rate(arrivals, 10**9) == pytest.approx(0.366, rel=0.05)
    assert _hit_rate(arrivals, 5859) == pytest.approx(0.136, rel=0.05)
    assert arrivals[-1].time == pytest.approx(3537, rel=0.05)


def test_the_generator_behaves_like_the_published_trace() -> None:
    _check(generate(12_031, seed=0))


def test_the_published_trace_is_read_as_published() -> None:
    if not PUBLISHED.exists():
        pytest.skip("the published trace is not beside the project")
    arrivals = read(str(PUBLISHED))
    assert len(arrivals) == 12_031
    _check(arrivals)


def test_generated_traces_are_sound_and_repeatable(tmp_path: Path) -> None:
    arrivals = generate(500, seed=3)
    assert arrivals == generate(500, seed=3) != generate(500, seed=4)
    for arrival in arrivals:
        assert len(arrival.blocks) == -(-arrival.tokens // BLOCK_TOKENS) == len(set(arrival.blocks))
        assert arrival.blocks[0] == 0
    path = tmp_path / "trace.jsonl"
    write(str(path), arrivals)
    again = read(str(path))
    assert [(each.tokens, each.output, each.blocks) for each in again] == [(each.tokens, each.output, each.blocks) for each in arrivals]
    assert all(abs(one.time - other.time) < 0.001 for one, other in zip(again, arrivals))
    assert len(read(str(path), 7)) == 7


GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nonsense", "line 2"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 5}', "hash_ids"),
        ('{"timestamp": -1, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}', "timestamp must be 0 or more"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []}', "input_length must be 1 or more"),
        ('{"timestamp": 0, "input_length": 600, "output_length": -1, "hash_ids": [0, 1]}', "output_length 0 or more"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0]}', "one id for every 512 tokens"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [3, 3]}', "a block twice"),
    ],
)
def test_a_line_that_does_not_fit_is_refused_by_name(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + line + "\n")
    with pytest.raises(ConfigError, match=complaint) as error:
        read(str(path))
    assert "line 2" in str(error.value)


def test_files_that_are_not_there_or_empty_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no requests"):
        read(str(tmp_path / "empty.jsonl"))
    with pytest.raises(ConfigError, match="--generate-trace"):
        write(str(tmp_path / "no" / "folder.jsonl"), [])
