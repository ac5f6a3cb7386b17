"""Twenty prompts for the demo model, as different as a small model allows: chat, code, lists, numbers, blanks, scripts, lengths.

A prompt is a text (taken as it is) or a list of messages (through the model's own template). `free` prompts may end by themselves; the
others are told to ignore the end of sequence, so that every one yields the full number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["HARD_TEXTS", "PROMPTS", "Prompt"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `source` is text or messages."""

    name: str
    source: str | list[dict[str, Any]]
    free: bool = False


def _ask(text: str, *, system: str | None = None) -> list[dict[str, Any]]:
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": text}]


STORY = (
    "The lighthouse keeper wrote down the weather every morning. On day {day} the wind came from the {wind}, the glass stood at {glass} "
    "and {ships} ships passed before noon. "
)
LONG = "".join(
    STORY.format(day=day, wind=("north", "south-west", "east")[day % 3], glass=980 + 7 * day % 50, ships=day * day % 11)
    for day in range(1, 19)
)

PROMPTS = (
    Prompt("capital", _ask("What is the capital of France?"), free=True),
    Prompt("one word", "Once"),
    Prompt("code", "def fibonacci(n):\n    if n < 2:\n        return n\n"),
    Prompt("numbers", "1, 1, 2, 3, 5, 8, 13, 21,   34,    55,\t89,\n\n  144, 233, "),
    Prompt("poem", _ask("Write a short poem about the sea.")),
    Prompt("list", "Shopping list:\n- apples\n- bread\n- "),
    Prompt("sum", _ask("What is 12 + 30? Answer with the number only."), free=True),
    Prompt("umlauts and emoji", "Größe, façade, naïve – déjà vu 🙂🚀 Übermut: "),
    Prompt("cjk", _ask("把这句话翻译成英文:今天天气很好。")),
    Prompt("json", '{"name": "Ada", "born": 1815, "fields": ["mathematics", '),
    Prompt("system", _ask("Who are you?", system="You are a pirate. Answer in one sentence."), free=True),
    Prompt("dialogue", [*_ask("Hello!"), {"role": "assistant", "content": "Hi. How can I help?"}, *_ask("Name three colours.")], free=True),
    Prompt("table", "| city   | people    |\n|--------|-----------|\n| Paris  | 2 100 000 |\n| London |"),
    Prompt("shell", "$ ls -la\ntotal 24\ndrwxr-xr-x  3 ada users 4096 Jan  1 12:00 .\n"),
    Prompt("blank lines", "\n\n\n    indented\n\n\n        deeper   2 spaces  10\n"),
    Prompt("sorting", _ask("Write a Python function that sorts a list of numbers.")),
    Prompt("science", "Photosynthesis is the process by which"),
    Prompt("yes or no", _ask("Is water wet? Answer yes or no."), free=True),
    Prompt("letters", "a b c d e f g h i j"),
    Prompt("long", LONG + "In short,"),
)

# What tokenizers disagree about.
HARD_TEXTS = (
    "a  1", "x\t\t22", "y\n\n333", " 4 5  6   7", "3.14159e-10", "1,000,000", "\r\n\r\n42\r\n", "   ", "\n", "don't WE'LL i'm",
    "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "e\u0301 \u00e9", "\u200b\u00a0\u3000x", "naïve\u2028line",
    "\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7", "½ ² Ⅷ ٣٤",
)  # fmt: skip
