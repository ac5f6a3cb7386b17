"""Pages as float8 e4m3, without scales: half of bfloat16's bytes, whatever the send.

Range: e4m3 spans 2**-9 to 448 with 4 significant bits. Keys and values of trained models lie well inside (attention logits are O(10)), so
what is larger saturates at 448, and what is smaller than 2**-10 becomes 0, an absolute error that attention does not notice. NaN becomes
0, infinities saturate. Invariant: no code for NaN is ever written, and a body that holds one is refused. Used by `codec` only.
"""

from __future__ import annotations

import torch

from radixpd.kv.layout import KVLayout

__all__ = ["Float8"]

_MAX = 448.0
_NAN = 0x7F  # the code under the sign bit; e4m3 has no infinities
_CHUNK = 1 << 18  # values worked on at once: enough that torch's cost per call is small, little enough for the caches


class Float8:
    """`Packing` of one byte a value, in the pages' own order."""

    kind = 1

    def __init__(self, layout: KVLayout) -> None:
        self._page = 2 * layout.page_size * layout.kv_heads * layout.head_dim
        self._chunk = max(1, _CHUNK // self._page)

    def size(self, pages: int) -> int:
        """Bytes of the body."""
        return pages * self._page

    def spans(self, pages: int) -> list[tuple[int, int]]:
        """Page ranges that are coded one after the other."""
        return [(first, min(first + self._chunk, pages)) for first in range(0, pages, self._chunk)]

    def pack(self, pages: torch.Tensor, body: torch.Tensor) -> int:
        """Fill `body`; there are no variants, so the flags are 0."""
        scratch = torch.empty(min(len(pages), self._chunk), *pages.shape[1:])
        for first, last in self.spans(len(pages)):
            values = (
                scratch[: last - first].copy_(pages[first:last]).clamp_(-_MAX, _MAX)
            )  # not every torch saturates by itself: some make it NaN
            codes = values.to(torch.float8_e4m3fn).view(torch.uint8).flatten()
            if _holds_nan(codes):
                codes.masked_fill_(codes.bitwise_and(_NAN) == _NAN, 0)
            body[first * self._page : last * self._page] = codes
        return 0

    def check(self, body: torch.Tensor, flags: int, pages: int, limit: float) -> None:
        """ValueError for what `pack` never writes."""
        if flags:
            raise ValueError(f"fp8 body with unknown flags {flags}")
        for first, last in self.spans(pages):
            if _holds_nan(body[first * self._page : last * self._page]):
                raise ValueError("fp8 body holds NaN")

    def unpack(self, body: torch.Tensor, flags: int, pages: int, span: tuple[int, int], out: torch.Tensor) -> None:
        """Fill `out` [last - first, 2, page_size, kv_heads, head_dim] with pages `first .. last`."""
        first, last = span
        codes = body[first * self._page : last * self._page].view(torch.int8).to(torch.int16)
        # e4m3's exponent and mantissa, moved under float16's, are the value times 2**-8 (bias 7 against 15), subnormals too. The sign
        # was extended: bit 15 keeps it, bit 14 is cleared. Ten times as fast as torch's own conversion.
        half = codes.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
        out.copy_(half.to(torch.float32).mul_(256.0).view(out.shape))


def _holds_nan(codes: torch.Tensor) -> bool:
    # The largest, because that is ten times as fast as comparing each.
    return int(codes.bitwise_and(_NAN).amax()) == _NAN
