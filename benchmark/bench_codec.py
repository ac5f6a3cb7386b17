"""What compression on the wire costs and saves: `python -m benchmark.bench_codec [--model-path demo] [--tokens 2048] [--skip-quality]`.

Speed: one thread, one layer of `--tokens` tokens, in bytes of the same pages in bfloat16; best of `--repeats`. Size: of bfloat16's bytes,
scales and header counted. Error: mean KL divergence, in nats, of the model's next-token distributions (float32) after a prefix whose KV
went through the codec, against the same prefix untouched. Every text of `codec_texts` is read once: the prefix is its first `HEAD` tokens,
after none, one or two other texts, in whole pages; the positions judged are all that follow, each given the true tokens before it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmark.codec_texts import TEXTS
from radixpd.attention.base import AttentionInputs
from radixpd.attention.paged_index import paged_index
from radixpd.attention.registry import build_attention
from radixpd.config.settings import ModelSettings
from radixpd.engine.parallel import Solo
from radixpd.errors import ConfigError
from radixpd.kv.codec import build_codec, measure
from radixpd.kv.codec_choice import NAMES
from radixpd.kv.layout import KVLayout
from radixpd.models.decoder import Decoder
from radixpd.models.weights import load_decoder
from radixpd.runtime.model_files import prepare
from radixpd.text.tokenizer import load_tokenizer

__all__ = ["TARGETS", "Quality", "main", "quality"]

PAGE_SIZE = 16
HEAD = 128
TARGETS = {"fp8_e4m3": (0.50, 0.003), "int8": (0.54, 0.0005), "int4": (0.32, 0.012)}  # largest size, largest mean KL
SHAPES = {"demo, 3 heads of 64": (3, 64), "70B, 8 heads of 128": (8, 128)}


@dataclass(frozen=True, slots=True)
class Quality:
    """KL divergence over `positions` next-token distributions, in nats; `same` is the share whose most likely token did not change."""

    name: str
    positions: int
    mean: float
    median: float
    p99: float
    same: float


class Reader:
    """One sequence at a time through the real decoder and attention, in pages 0, 1, 2 ... of a float32 pool."""

    def __init__(self, decoder: Decoder, tokens: int) -> None:
        spec = decoder.spec
        self.layout = KVLayout(spec.layers, decoder.kv_heads, spec.head_dim, PAGE_SIZE, "float32")
        shape = (-(-tokens // PAGE_SIZE), 2, PAGE_SIZE, decoder.kv_heads, spec.head_dim)
        self.layers = [torch.zeros(shape) for _ in range(spec.layers)]
        self._decoder = decoder
        self._attention = build_attention("torch_native", self.layers, heads=decoder.heads, head_dim=spec.head_dim)
        self._table = np.arange(shape[0], dtype=np.int32)[None]

    def read(self, start: int, tokens: torch.Tensor) -> torch.Tensor:
        """Log probabilities of what follows each of `tokens`, which stand at positions `start` onwards."""
        slot, first, length = (np.array([value], dtype=np.int32) for value in (0, start, len(tokens)))
        index = paged_index(self._table, slot, first, length, PAGE_SIZE)
        inputs = AttentionInputs(
            qo_indptr=torch.from_numpy(index.qo_indptr),
            indptr=torch.from_numpy(index.indptr),
            indices=torch.from_numpy(index.indices),
            last_page_len=torch.from_numpy(index.last_page_len),
            page_size=PAGE_SIZE,
        )
        attend = self._attention.plan(inputs)
        with torch.inference_mode():
            hidden = self._decoder.forward(tokens, torch.arange(start, start + len(tokens)), attend)
            return torch.log_softmax(self._decoder.logits(hidden), dim=-1)


def quality(names: Sequence[str], model_path: str = "demo", texts: Sequence[str] = TEXTS) -> list[Quality]:
    """Measure each codec on the same prefixes and positions."""
    directory = Path(prepare(ModelSettings(model_path=model_path)).directory)
    tokenizer = load_tokenizer(directory)
    ids = [torch.tensor(list(tokenizer.encode(text))) for text in texts]
    reader = Reader(load_decoder(directory, dtype="float32", parallel=Solo()), 3 * max(map(len, ids)))
    codecs = [build_codec(name, reader.layout) for name in names]
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in names}
    for number, text in enumerate(ids):
        prompt = torch.cat((*ids[number - number % 3 : number], text))
        prefix = (len(prompt) - len(text) + HEAD) // PAGE_SIZE * PAGE_SIZE
        reader.read(0, prompt[:prefix])
        pages = torch.arange(prefix // PAGE_SIZE)
        kept = [layer[pages] for layer in reader.layers]
        truth = reader.read(prefix, prompt[prefix:])
        for codec in codecs:
            data = torch.empty(codec.encoded_bytes(len(pages)), dtype=torch.uint8)
            for layer, whole in zip(kept, reader.layers):
                codec.encode_into(layer, data)
                codec.decode_into(data, whole, pages)
            coded = reader.read(prefix, prompt[prefix:])
            found[codec.name].append(((truth.exp() * (truth - coded)).sum(-1), truth.argmax(-1) == coded.argmax(-1)))
    return [_summary(name, found[name]) for name in names]


def _summary(name: str, found: list[tuple[torch.Tensor, torch.Tensor]]) -> Quality:
    kl, same = (torch.cat(parts).double() for parts in zip(*found))
    return Quality(name, len(kl), float(kl.mean()), float(kl.median()), float(kl.quantile(0.99)), float(same.mean()))


def print_speeds(tokens: int, repeats: int) -> None:
    """Size and speed of every codec, for pools of bfloat16 and float32."""
    torch.set_num_threads(1)
    print(f"one layer of {tokens} tokens, one thread; GB/s of bfloat16 bytes, size of bfloat16 bytes")
    print(f"{'shape':<22}{'pool':<10}{'codec':<10}{'size':>8}{'encode':>9}{'decode':>9}")
    for shape, (heads, width) in SHAPES.items():
        for dtype, wide in (("bfloat16", 1), ("float32", 2)):
            layout = KVLayout(1, heads, width, PAGE_SIZE, dtype)
            for name in NAMES:
                speed = measure(build_codec(name, layout), layout, pages=-(-tokens // PAGE_SIZE), repeats=repeats)
                figures = f"{speed.ratio * wide:>8.4f}{speed.encode / wide / 1e9:>9.2f}{speed.decode / wide / 1e9:>9.2f}"
                print(f"{shape:<22}{dtype:<10}{name:<10}{figures}")


def print_quality(model_path: str) -> None:
    """KL of every lossy codec against its target."""
    rows = quality(list(TARGETS), model_path)
    print(f"\nKL of next-token distributions, {model_path}, {rows[0].positions} positions")
    print(f"{'codec':<10}{'mean':>10}{'target':>10}{'median':>10}{'p99':>10}{'same best token':>18}")
    for row in rows:
        print(f"{row.name:<10}{row.mean:>10.5f}{TARGETS[row.name][1]:>10.4f}{row.median:>10.5f}{row.p99:>10.5f}{row.same:>17.1%}")


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    parser = argparse.ArgumentParser(prog="benchmark.bench_codec", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--skip-quality", action="store_true", help="speed and size only")
    options = parser.parse_args(argv)
    if options.tokens < 1 or options.repeats < 1:
        parser.error("--tokens and --repeats must be at least 1")
    try:
        if not options.skip_quality:
            print_quality(options.model_path)
        print_speeds(options.tokens, options.repeats)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
