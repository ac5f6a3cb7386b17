"""Names for pages: chained SHA-256, so that one hash names a page *and its whole prefix*, and namespaces that never collide.

The same functions serve the radix tree, KV events and (later) tiers and the load balancer: one key function for all. Token ids are
hashed as little-endian int32. Parts of a namespace are tagged and length-framed: ("salt", "x") and ("adapter", "x") differ, and no
joining of values can imitate another. KV that went through a lossy codec lives in namespaces of its own (`lossy`), and its pages have no
hash: nobody else is told of them, and nothing of them can be stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

__all__ = ["event_id", "is_lossy", "lossy", "namespace", "page_hashes", "prompt_digest", "root_hash", "token_bytes"]

LOSSY = b"lossy|"


def token_bytes(tokens: np.ndarray) -> bytes:
    """Token ids as little-endian int32 bytes, the form in which tree and hashes see them."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def namespace(parts: Mapping[str, str]) -> bytes:
    """32 bytes naming a cache namespace from tagged parts such as `{"cache_salt": ...}`; empty for no parts."""
    if not parts:
        return b""
    digest = hashlib.sha256()
    for tag in sorted(parts):
        for text in (tag.encode(), parts[tag].encode()):
            digest.update(len(text).to_bytes(4, "little"))
            digest.update(text)
    return digest.digest()


def lossy(space: bytes, codec: str) -> bytes:
    """Where KV of a namespace goes that may have been through `codec`. Longer than a digest, so that no client can ask for it."""
    return LOSSY + codec.encode().ljust(32) + b"|" + space


def is_lossy(space: bytes) -> bool:
    """Whether it is one of those."""
    return len(space) > 32 and space.startswith(LOSSY)


def root_hash(fingerprint: str, space: bytes) -> bytes:
    """Where a hash chain starts: model and KV format (`fingerprint`), then the namespace."""
    name = fingerprint.encode()
    return hashlib.sha256(len(name).to_bytes(4, "little") + name + space).digest()


def prompt_digest(tokens: np.ndarray) -> bytes:
    """32 bytes naming a whole prompt, whatever the pages."""
    return hashlib.sha256(token_bytes(tokens)).digest()


def page_hashes(parent: bytes, data: bytes, page_bytes: int) -> list[bytes]:
    """Hashes of the consecutive full pages in `data` (token bytes), chained on `parent`."""
    hashes = []
    for at in range(0, len(data) - page_bytes + 1, page_bytes):
        parent = hashlib.sha256(parent + data[at : at + page_bytes]).digest()
        hashes.append(parent)
    return hashes


def event_id(page_hash: bytes) -> int:
    """The 64-bit id of a page in KV events: the low (last) 8 bytes of its hash, big-endian, unsigned."""
    return int.from_bytes(page_hash[-8:], "big")
