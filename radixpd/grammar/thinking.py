"""A grammar for an output that thinks first: any text up to the closing mark, then what the grammar says. Pure.

The free part is a finite automaton, right recursive: a rule for each character of the mark that may have been read. A lexer has it as one
piece (`LEXED`): only the mark's first character can begin it anew. A grammar of tags leaves text free anyway and stays as it is. Called by
the chat route and the llguidance backend; the marks are those of `text.reasoning`.
"""

from __future__ import annotations

import re

from radixpd.core.request import Grammar
from radixpd.grammar.charset import complement, literal, normal, spelt

__all__ = ["BEGIN", "END", "LEXED", "THOUGHT", "behind_thought"]

BEGIN, END = "<think>", "</think>"
# What may hold the name of a rule, and what only looks like it.
TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|\[(?:[^\]\\]|\\.)*\]|#[^\n]*|[A-Za-z_][A-Za-z0-9_.-]*', re.DOTALL)
BLANKS = '("\\n" "\\n"?)?'


def behind_thought(grammar: Grammar, *, inside: bool | None) -> Grammar:
    """The grammar behind a thought. `inside`: the output begins within it; None: it may open one."""
    if grammar.kind != "ebnf" or inside is False:
        return grammar
    document = TOKENS.sub(lambda found: "answer" if found[0] == "root" else found[0], grammar.text)
    root = "thought0" if inside else f"answer | {literal(BEGIN)} thought0"
    return Grammar("ebnf", f"root ::= {root}\n{THOUGHT}\n{document}")


def _but(chars: str) -> str:
    return spelt(complement(normal((ord(char), ord(char)) for char in chars)))


def _automaton() -> str:
    """Rule i: so many characters of the mark have just been read."""
    lines = []
    for read in range(len(END)):
        options = []
        for char in dict.fromkeys(END):
            seen = END[:read] + char
            kept = next(size for size in range(len(seen), -1, -1) if END.startswith(seen[len(seen) - size :]))
            options.append(f"{literal(char)} " + (f"{BLANKS} answer" if kept == len(END) else f"thought{kept}"))
        lines.append(f"thought{read} ::= {' | '.join(options)} | {_but(END)} thought0")
    return "\n".join(lines)


def _piece() -> str:
    starts = [END[:read] for read in range(1, len(END))]
    before = f"({' | '.join(map(literal, starts))})*"
    broken = " | ".join(f"{literal(start)} {_but(END[0] + END[len(start)])}" for start in starts)
    return f"thought0 ::= thought {BLANKS} answer\nthought ::= ({_but(END[0])} | {before} ({broken}))* {before} {literal(END)}"


THOUGHT, LEXED = _automaton(), _piece()
