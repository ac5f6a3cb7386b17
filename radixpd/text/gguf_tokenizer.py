"""The tokenizer inside a GGUF file -> tokenizer.json, tokenizer_config.json and generation_config.json.

GGUF keeps vocabulary and merges but only a *name* for the pre-tokenizer, so each name we know is spelt out in `PRE_TOKENIZERS`; an
unknown one is refused, for a wrong split gives plausible but wrong ids. Called once per file by `runtime.model_files`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from radixpd.errors import ConfigError

__all__ = ["PRE_TOKENIZERS", "write_gguf_tokenizer"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # GGUF token types (5 = unused)
SPACE = "\u2581"

Json = dict[str, Any]


def _words(digits: str) -> str:
    """The word pattern that Llama 3 introduced; `digits` is how numbers are cut."""
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    return contractions + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> Json:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(False)]}


_LLAMA3 = _split(_words(r"\p{N}{1,3}"))
_QWEN2 = _split(_words(r"\p{N}"))
_SMOLLM = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(True)]}

# By the value of `tokenizer.ggml.pre`.
PRE_TOKENIZERS: dict[str, Json] = {
    "gpt-2": _byte_level(True),
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
ADD_BOS_BY_DEFAULT = frozenset({"llama-bpe", "llama3", "llama-v3"})


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokenizer keys of one file, read once."""

    name: str
    tokens: list[str]
    types: list[int]
    values: dict[str, Any]  # keys without the `tokenizer.ggml.` prefix

    def token(self, key: str) -> str | None:
        id = self.values.get(key)
        return self.tokens[id] if isinstance(id, int) and 0 <= id < len(self.tokens) else None


def write_gguf_tokenizer(reader: gguf.GGUFReader, name: str, directory: Path) -> None:
    """Write the tokenizer files of the GGUF that `reader` has open (file `name`) into `directory`."""
    vocabulary = _read(reader, name)
    if vocabulary.values.get("model") == "gpt2":
        tokenizer, add_bos = _byte_level_bpe(vocabulary)
    elif vocabulary.values.get("model") == "llama":
        tokenizer, add_bos = _sentencepiece_bpe(vocabulary)
    else:
        model = vocabulary.values.get("model")
        raise ConfigError(f"{vocabulary.name}: its tokenizer model is {model!r}; supported: gpt2, llama; give --tokenizer-path")
    add_bos = bool(vocabulary.values.get("add_bos_token", add_bos))
    tokenizer["post_processor"] = _post_processor(vocabulary, add_bos)
    _write(directory / "tokenizer.json", tokenizer)
    _write(directory / "tokenizer_config.json", _tokenizer_config(vocabulary, reader, add_bos))
    _write(directory / "generation_config.json", _generation_config(vocabulary))


def _read(reader: gguf.GGUFReader, name: str) -> _Vocabulary:
    prefix = "tokenizer.ggml."
    values = {key.removeprefix(prefix): field.contents() for key, field in reader.fields.items() if key.startswith(prefix)}
    tokens = values.pop("tokens", None)
    if not tokens:
        raise ConfigError(f"{name} holds no tokenizer; give one with --tokenizer-path")
    types = values.pop("token_type", None) or [NORMAL] * len(tokens)
    return _Vocabulary(name=name, tokens=tokens, types=types, values=values)


def _byte_level_bpe(vocabulary: _Vocabulary) -> tuple[Json, bool]:
    pre = str(vocabulary.values.get("pre", "gpt-2"))
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ConfigError(f"{vocabulary.name}: pre-tokenizer {pre!r} is not known (known: {known}); give --tokenizer-path")
    llama3 = PRE_TOKENIZERS[pre] is _LLAMA3
    merges = [merge.split(" ", 1) for merge in vocabulary.values.get("merges", [])]
    model = _bpe(vocabulary, merges, unk=None, byte_fallback=False, ignore_merges=llama3)
    tokenizer = _document(vocabulary, model)
    tokenizer["normalizer"] = {"type": "NFC"} if PRE_TOKENIZERS[pre] is _QWEN2 else None
    tokenizer["pre_tokenizer"] = PRE_TOKENIZERS[pre]
    tokenizer["decoder"] = _byte_level(True)
    return tokenizer, pre in ADD_BOS_BY_DEFAULT


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> tuple[Json, bool]:
    """SentencePiece BPE has scores, not merges: the better the score of the merged piece, the earlier the merge."""
    scores = vocabulary.values.get("scores")
    if not scores:
        raise ConfigError(f"{vocabulary.name}: its tokenizer has no scores; give --tokenizer-path")
    model = _bpe(vocabulary, _merges_by_score(vocabulary.tokens, scores), unk=_unknown(vocabulary), byte_fallback=True, ignore_merges=False)
    tokenizer = _document(vocabulary, model)
    prefix = bool(vocabulary.values.get("add_space_prefix", True))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]} if prefix else spaces
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]}
    return tokenizer, True


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[list[str]]:
    ids = {token: id for id, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-score, ids[left], ids[right], left, right))
    merges.sort()
    return [[left, right] for _, _, _, left, right in merges]


def _unknown(vocabulary: _Vocabulary) -> str | None:
    if UNKNOWN in vocabulary.types:
        return vocabulary.tokens[vocabulary.types.index(UNKNOWN)]
    return vocabulary.token("unknown_token_id")


def _bpe(vocabulary: _Vocabulary, merges: list[list[str]], *, unk: str | None, byte_fallback: bool, ignore_merges: bool) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": {token: id for id, token in enumerate(vocabulary.tokens)},
        "merges": merges,
    }


def _document(vocabulary: _Vocabulary, model: Json) -> Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": id, "content": vocabulary.tokens[id], "special": kind != USER_DEFINED, **flags}
        for id, kind in enumerate(vocabulary.types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model,
    }


def _post_processor(vocabulary: _Vocabulary, add_bos: bool) -> Json | None:
    before = vocabulary.token("bos_token_id") if add_bos else None
    after = vocabulary.token("eos_token_id") if vocabulary.values.get("add_eos_token") else None
    ends = {text: {"id": text, "ids": [vocabulary.tokens.index(text)], "tokens": [text]} for text in (before, after) if text is not None}
    if not ends:
        return None

    def frame(sequence: str, type_id: int) -> list[Json]:
        def mark(text: str | None) -> list[Json]:
            return [] if text is None else [{"SpecialToken": {"id": text, "type_id": type_id}}]

        return [*mark(before), {"Sequence": {"id": sequence, "type_id": type_id}}, *mark(after)]

    return {"type": "TemplateProcessing", "single": frame("A", 0), "pair": [*frame("A", 0), *frame("B", 1)], "special_tokens": ends}


def _tokenizer_config(vocabulary: _Vocabulary, reader: gguf.GGUFReader, add_bos: bool) -> Json:
    names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
    config: Json = {name: text for name, key in names.items() if (text := vocabulary.token(key)) is not None}
    config["add_bos_token"] = add_bos
    config["add_eos_token"] = bool(vocabulary.values.get("add_eos_token", False))
    config["clean_up_tokenization_spaces"] = False
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    template = reader.get_field("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template.contents()
    return config


def _generation_config(vocabulary: _Vocabulary) -> Json:
    """End of sequence, of turn and of message all end an output."""
    eos = dict.fromkeys(id for key in ("eos_token_id", "eot_token_id", "eom_token_id") if isinstance(id := vocabulary.values.get(key), int))
    config: Json = {"eos_token_id": list(eos)}
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if isinstance(vocabulary.values.get(key), int):
            config[name] = vocabulary.values[key]
    return config


def _write(path: Path, document: Json) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
