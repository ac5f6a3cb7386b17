"""What two movers say to each other on a data connection, byte by byte. Little endian; nothing here touches a socket.

The receiver greets with a challenge, the sender answers with a proof that it has the token and a challenge of its own, the receiver
answers that: the token itself never travels. Then the sender sends frames: head, list of page runs, the pages' bytes (not with shm, where
they lie in place already), one verdict byte. Coded pages have the codec's name and their size between head and runs, so that a receiver
without that codec can still read on. The verdict comes last on purpose: a frame whose source pages were given up while it was on
its way is declared void, and counts for nothing. Each frame is answered by its number and a status.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import numpy as np

__all__ = [
    "ANSWER", "BYE", "CHALLENGE", "CODED", "CODEC", "CODING", "DAMAGED", "DATA", "FORGET", "FOREIGN", "GOOD", "GREETING", "HEAD", "MAGIC",
    "PROOF", "REFUSALS", "RUN", "TAKEN", "UNKNOWN", "VERSION", "VOID", "WITHDRAWN", "codec_of", "pages_of", "proof", "runs_of",
]  # fmt: skip

MAGIC, VERSION = b"rxkv", 1
CHALLENGE, PROOF = 16, 32  # bytes
GREETING = struct.Struct("<4sI16s")  # magic, version, challenge
HEAD = struct.Struct("<HHIQQ")  # kind, layer, runs, room, number
CODING = struct.Struct("<16sI")  # codec, bytes of the coded pages
RUN = np.dtype(("<u4", 2))  # first page, count
ANSWER = struct.Struct("<QB")  # number, status

DATA, FORGET, BYE, CODED = 1, 2, 3, 4  # kinds: pages; the room is over; this sender can write no more; coded pages
GOOD, VOID = b"\x01", b"\x00"  # verdicts
TAKEN, UNKNOWN, FOREIGN, WITHDRAWN, CODEC, DAMAGED = 0, 1, 2, 3, 4, 5  # statuses
REFUSALS = {
    UNKNOWN: "the receiver does not expect this room, or no longer",
    FOREIGN: "the receiver does not expect these pages in this room",
    WITHDRAWN: "the send was withdrawn",
    CODEC: "the receiver does not take this transfer dtype (--disaggregation-transfer-dtype there)",
    DAMAGED: "the receiver could not decode the pages",
}


def runs_of(pages: np.ndarray) -> np.ndarray:
    """Page ids as runs of adjacent pages, `[k, 2]`: first page, count. Order is kept."""
    cuts = np.flatnonzero(np.diff(pages) != 1) + 1
    ends = np.append(cuts, len(pages))
    starts = np.concatenate(([0], cuts))
    return np.stack([pages[starts], ends - starts], axis=1).astype("<u4")


def pages_of(runs: np.ndarray) -> np.ndarray:
    """The page ids of runs, int64. The caller has bounded their sum."""
    first, count = runs[:, 0].astype(np.int64), runs[:, 1].astype(np.int64)
    before = np.cumsum(count) - count
    return np.repeat(first - before, count) + np.arange(int(count.sum()))


def codec_of(field: bytes) -> str:
    """The codec's name; anything at all if somebody makes one up."""
    return field.rstrip(b"\0").decode("ascii", errors="replace")


def proof(token: bytes, who: str, challenges: bytes, fingerprint: str) -> bytes:
    """What only a holder of the token can say about these challenges, in this role, for this layout."""
    return hmac.digest(token, b"|".join((MAGIC, who.encode(), challenges, fingerprint.encode())), hashlib.sha256)
