"""What two movers say to each other on a data connection, byte by byte. Little endian; nothing here touches a socket.

The receiver greets with a challenge, the sender answers with a proof that it has the token and a challenge of its own, the receiver
answers that: the token itself never travels. Then the sender sends frames: head, list of page runs, the pages' bytes (not with shm, where
they lie in place already), one verdict byte. The verdict comes last on purpose: a frame whose source pages were given up while it was on
its way is declared void, and counts for nothing. Each frame is answered by its number and a status.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import numpy as np

__all__ = [
    "ANSWER", "BYE", "CHALLENGE", "DATA", "FORGET", "FOREIGN", "GOOD", "GREETING", "HEAD", "MAGIC", "PROOF", "REFUSALS", "RUN", "TAKEN",
    "UNKNOWN", "VERSION", "VOID", "WITHDRAWN", "pages_of", "proof", "runs_of",
]  # fmt: skip

MAGIC, VERSION = b"rxkv", 1
CHALLENGE, PROOF = 16, 32  # bytes
GREETING = struct.Struct("<4sI16s")  # magic, version, challenge
HEAD = struct.Struct("<HHIQQ")  # kind, layer, runs, room, number
RUN = np.dtype(("<u4", 2))  # first page, count
ANSWER = struct.Struct("<QB")  # number, status

DATA, FORGET, BYE = 1, 2, 3  # kinds: pages; the room is over; this sender can write no more
GOOD, VOID = b"\x01", b"\x00"  # verdicts
TAKEN, UNKNOWN, FOREIGN, WITHDRAWN = 0, 1, 2, 3  # statuses
REFUSALS = {
    UNKNOWN: "the receiver does not expect this room, or no longer",
    FOREIGN: "the receiver does not expect these pages in this room",
    WITHDRAWN: "the send was withdrawn",
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


def proof(token: bytes, who: str, challenges: bytes, fingerprint: str) -> bytes:
    """What only a holder of the token can say about these challenges, in this role, for this layout."""
    return hmac.digest(token, b"|".join((MAGIC, who.encode(), challenges, fingerprint.encode())), hashlib.sha256)
