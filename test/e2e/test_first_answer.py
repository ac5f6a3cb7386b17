"""The least that must work: one command, one answer, and no torch outside the runner."""

from __future__ import annotations

from pathlib import Path

from e2e.servers import Server


def test_generate_answers(server: Server) -> None:
    answer = server.generate(text="hello", sampling_params={"temperature": 0, "max_new_tokens": 5, "ignore_eos": True})
    assert len(answer["output_ids"]) == 5
    assert answer["meta_info"]["prompt_tokens"] == 5
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


def test_ready_line(server: Server) -> None:
    assert "The server is fired up and ready to roll!" in server.log


def test_only_the_runner_loads_torch(server: Server) -> None:
    maps = {name: Path(f"/proc/{pid}/maps").read_text() for name, pid in server.children().items()}
    assert set(maps) == {"api", "scheduler", "runner"}
    assert {name: "libtorch" in text for name, text in maps.items()} == {"api": False, "scheduler": False, "runner": True}
