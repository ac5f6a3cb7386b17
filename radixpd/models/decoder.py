"""One decoder for every dense family of the table: pre-norm, rotary grouped-query attention, gated MLP.

It owns weights and arithmetic only: where keys and values live is the business of the `attend` function it is handed, so prefill, chunks,
cache hits and decode are the same call. Names are Hugging Face's. The runner builds it through `weights.load_decoder`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from radixpd.errors import ConfigError
from radixpd.models.layers import (
    MLP,
    Attend,
    ColumnLinear,
    Embedding,
    Gemm,
    HeadNorm,
    Parallel,
    Place,
    RMSNorm,
    Rotation,
    RowLinear,
    Target,
    Targets,
)
from radixpd.models.rope import Rope, rotate
from radixpd.models.spec import ModelSpec

__all__ = ["Decoder"]

_READABLE = (torch.float32, torch.bfloat16, torch.float16)


class DecoderLayer:
    """Attention block and MLP block, each around the residual stream."""

    def __init__(self, spec: ModelSpec, index: int, place: Place) -> None:
        size, width = place.parallel.size, spec.head_dim
        self._index, self._head_dim = index, width
        self._heads, self._kv_heads = spec.heads // size, spec.kv_heads // size
        rows = {"q_proj": spec.heads * width, "k_proj": spec.kv_heads * width, "v_proj": spec.kv_heads * width}
        self._qkv = ColumnLinear(spec.hidden, rows, bias=spec.qkv_bias, place=place)
        self._qk_norm = HeadNorm(self._heads, self._kv_heads, width, spec.rms_eps, place=place) if spec.qk_norm else None
        self._out = RowLinear("o_proj", spec.heads * width, spec.hidden, bias=spec.o_bias, place=place)
        self._mlp = MLP(spec.hidden, spec.intermediate, bias=spec.mlp_bias, place=place)
        self._before_attention = RMSNorm("input_layernorm", spec.hidden, spec.rms_eps, place=place)
        self._before_mlp = RMSNorm("post_attention_layernorm", spec.hidden, spec.rms_eps, place=place)

    def targets(self) -> Targets:
        """Everything under `model.layers.<index>`."""
        sources = [
            ("", self._before_attention.targets()),
            ("", self._before_mlp.targets()),
            ("self_attn.", self._qkv.targets()),
            ("self_attn.", self._out.targets()),
            ("mlp.", self._mlp.targets()),
        ]
        if self._qk_norm:
            sources.append(("self_attn.", self._qk_norm.targets()))
        for prefix, targets in sources:
            for name, target in targets:
                yield prefix + name, target

    def __call__(self, x: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        """x [tokens, hidden], updated in place."""
        heads = self._qkv(self._before_attention(x)).view(len(x), -1, self._head_dim)
        v = heads[:, self._heads + self._kv_heads :]
        qk = heads[:, : self._heads + self._kv_heads]
        if self._qk_norm:
            qk = self._qk_norm(qk)
        qk = rotate(qk, rotation)
        out = attend(self._index, qk[:, : self._heads], qk[:, self._heads :], v)
        x.add_(self._out(out.flatten(1)))
        return x.add_(self._mlp(self._before_mlp(x)))


class Decoder:
    """Tokens and positions in, hidden states out; logits for the rows one wants."""

    def __init__(self, spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        for name, count in (("attention heads", spec.heads), ("KV heads", spec.kv_heads), ("MLP columns", spec.intermediate)):
            if count % parallel.size:
                raise ConfigError(f"--tp-size {parallel.size} does not divide the model's {count} {name}")
        self.spec, self.dtype, self.device = spec, dtype, torch.device(device)
        self.heads, self.kv_heads = spec.heads // parallel.size, spec.kv_heads // parallel.size  # of this rank
        place = Place(parallel, dtype, self.device)
        self._rope = Rope(spec.rope, spec.head_dim, dtype, self.device)
        self._embed = Embedding(spec.vocab_size, spec.hidden, place=place)
        self._layers = [DecoderLayer(spec, index, place) for index in range(spec.layers)]
        self._norm = RMSNorm("norm", spec.hidden, spec.rms_eps, place=place)
        # The head is whole on every rank, and (tied) a second, packed copy of the embedding: the packed form cannot be looked up in.
        self._head = Gemm(spec.hidden, spec.vocab_size, bias=False, place=place)

    def _targets(self) -> Targets:
        shape = (self.spec.vocab_size, self.spec.hidden)
        yield "model.embed_tokens.weight", Target(shape, self._fill_embedding)
        if not self.spec.tied:
            yield "lm_head.weight", Target(shape, self._fill_head)
        for index, layer in enumerate(self._layers):
            for name, target in layer.targets():
                yield f"model.layers.{index}.{name}", target
        for name, target in self._norm.targets():
            yield f"model.{name}", target

    def _fill_embedding(self, tensor: torch.Tensor) -> None:
        self._embed.fill(tensor)
        if self.spec.tied:
            self._fill_head(tensor)

    def _fill_head(self, tensor: torch.Tensor) -> None:
        self._head.fill_weight(0, tensor)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and whole shape of every tensor that `load` needs."""
        return {name: target.shape for name, target in self._targets()}

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every weight once, in any order; `ConfigError` names a tensor that is missing, unexpected or of the wrong kind."""
        wanted = dict(self._targets())
        for name, tensor in weights:
            target = wanted.pop(name, None)
            if target is None:
                if self._ignored(name):
                    continue
                raise ConfigError(f"weights: unexpected tensor {name} for {self.spec.architecture}")
            if tuple(tensor.shape) != target.shape:
                raise ConfigError(f"weights: tensor {name} has shape {list(tensor.shape)}, config.json needs {list(target.shape)}")
            if tensor.dtype not in _READABLE:
                raise ConfigError(f"weights: tensor {name} has dtype {tensor.dtype}; supported: float32, bfloat16, float16")
            target.fill(tensor)
        if wanted:
            names = sorted(wanted)
            raise ConfigError(f"weights: {len(names)} tensors are missing, among them {', '.join(names[:3])}")

    def _ignored(self, name: str) -> bool:
        """Old exports carry rotary tables, and tied models their head a second time."""
        return name.endswith("rotary_emb.inv_freq") or (self.spec.tied and name == "lm_head.weight")

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """tokens and positions [T], integers -> final normed hidden states [T, hidden]."""
        rotation = self._rope(positions)
        x = self._embed(tokens)
        for layer in self._layers:
            x = layer(x, rotation, attend)
        return self._norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> float32 [R, vocab]."""
        return self._head(hidden).float()
