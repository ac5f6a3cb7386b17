"""The least that must work: one command, one answer, and no torch outside the runner."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from e2e.servers import Server, until


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


def test_live_processes_import_what_their_layer_may(tiny: Path, tmp_path: Path) -> None:
    """`sys.modules` of the running processes: torch and transformers in none but the runner (which needs only torch)."""
    paths = os.pathsep.join([str(Path(__file__).parent / "introspect"), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = Server(tiny, "--max-total-tokens", "1024", PYTHONPATH=paths, MODULES_DIR=str(tmp_path))
    try:
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3})
        children = server.children() | {"supervisor": server.process.pid}
        for pid in children.values():
            os.kill(pid, signal.SIGUSR1)
        until(lambda: all((tmp_path / str(pid)).exists() for pid in children.values()), "every process wrote its modules")
        loaded = {name: set((tmp_path / str(pid)).read_text().split()) for name, pid in children.items()}
    finally:
        assert server.close() == 0
    assert {name: "torch" in modules for name, modules in loaded.items()} == {
        "api": False, "scheduler": False, "runner": True, "supervisor": False,
    }  # fmt: skip
    assert not any("transformers" in modules for modules in loaded.values())
    assert "aiohttp" not in loaded["scheduler"] | loaded["runner"]
