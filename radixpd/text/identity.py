"""One name for everything that decides which token ids a prompt becomes: the tokenizer's files and the chat template's.

Invariant: equal names mean equal files, so two processes with the same name tokenize and render alike, wherever their files lie. Called by
the API process, which tells its own, and by the load balancer, which must tokenize as the servers do.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["text_identity"]

FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
)


def text_identity(directory: str | Path, *, chat_template: str | None = None) -> str:
    """Hex digits. `directory`: the tokenizer's; `chat_template`: a file that replaces the model's own."""
    folder = Path(directory)
    files = [*(folder / name for name in FILES), *sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    digest = hashlib.sha256()
    for name, path in [*((file.name, file) for file in files), *([] if chat_template is None else [("override", Path(chat_template))])]:
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name}\0{path.is_file()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:32]
