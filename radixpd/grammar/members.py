"""The inside of a JSON object as EBNF: properties in order with the commas between them, and keys that are none of some names.

Pure but for the rules that it adds. Called by `schema`.
"""

from __future__ import annotations

from radixpd.grammar.charset import literal, minus, normal, spelt
from radixpd.grammar.errors import GrammarError
from radixpd.grammar.pattern import PLAIN
from radixpd.grammar.rules import Rules

__all__ = ["members", "other_key"]


def members(rules: Rules, parts: list[tuple[str, bool]], tail: str) -> str:
    """All properties in order, the required ones always; nothing but what is there is separated by commas."""
    following = [tail]  # what may come behind property i, longest last
    for name, required in reversed(parts):
        item = f'", " {name}' if required else f'(", " {name})?'
        following.append(f"{item} {following[-1]}".strip())
    following.reverse()
    first = next((at for at, (_, required) in enumerate(parts) if required), None)
    if first == 0:
        return f"{parts[0][0]} {following[1]}".strip()
    # Named, since each is said twice: behind its own property and behind those that may be missing before it.
    for at in range(len(parts) - 1, 0, -1):
        name, required = parts[at]
        item = f'", " {name}' if required else f'(", " {name})?'
        following[at] = rules.add(f"{item} {following[at + 1]}".strip())
    last = len(parts) if first is None else first + 1
    options = [f"{name} {following[at + 1]}".strip() for at, (name, _) in enumerate(parts[:last])]
    if first is None:
        if tail:
            options.append(tail.removeprefix('(", " ').removesuffix(")*") + " " + tail)
        options.append('""')
    return f"({' | '.join(options)})"


def other_key(rules: Rules, names: list[str], path: str) -> str:
    """The rest of a key behind its first quote, of keys that are none of these."""
    if sum(map(len, names)) > 2000:
        raise GrammarError(f"additionalProperties at {path or '/'} is not supported beside so many properties")
    plain = [name for name in names if all(any(low <= ord(char) <= high for low, high in PLAIN) for char in name)]
    return _key_node(rules, plain)


def _key_node(rules: Rules, names: list[str]) -> str:
    """Keys that are none of `names`, from one place on."""
    rest = rules.use("jsonkeyrest")
    heads: dict[str, list[str]] = {}
    for name in names:
        if name:
            heads.setdefault(name[0], []).append(name[1:])
    options = [] if "" in names else ['"\\""']
    options += [f"{literal(head)} {_key_node(rules, tails)}" for head, tails in heads.items()]
    others = minus(PLAIN, normal((ord(head), ord(head)) for head in heads))
    return rules.add(" | ".join([*options, f"{spelt(others)} {rest}"]))
