"""Facts out of texts as JSON that always fits its schema. Needs a server with a grammar backend.

The schema and the instructions are the same for every text: `run_batch` lets the server compute them once.

    python python_frontend/examples/json_extraction.py http://127.0.0.1:30000
"""

from __future__ import annotations

import json
import sys
from typing import Any

import radixpd_lang as rx

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z .-]{1,30}$"},
        "born": {"type": "integer", "minimum": 0, "maximum": 2100},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "born", "alive"],
    "additionalProperties": False,
}
PHONE = r"\+[0-9]{2} [0-9]{3} [0-9]{4}"
TEXTS = (
    "Ada Lovelace, born in London in 1815, wrote the first published program. She died in 1852. Office: +44 123 4567.",
    "Emmy Noether was born in Erlangen in 1882 and died in 1935. Ring +49 913 1850 for the archive.",
    "Donald Knuth, born in 1938 in Milwaukee, still works on his fourth volume. Telephone +16 507 2323.",
)


@rx.function
def extract(s: rx.ProgramState, text: str) -> None:
    """Who a text is about, and the telephone number in it."""
    s += "Read the text. Write down whom it is about as a JSON object with the fields name, born (a year) and alive (true or false), "
    s += "then the telephone number.\n\n"
    s += f"Text: {text}\nJSON: " + rx.gen("person", max_tokens=160, json_schema=SCHEMA, temperature=0)
    s += "\nTelephone: " + rx.gen("phone", max_tokens=32, regex=PHONE, temperature=0)


def run(backend: rx.Backend, *, size: int = 3, hints: bool = True) -> list[dict[str, Any]]:
    """The person and the telephone number in each of `size` texts; a server without grammars ends this with its refusal."""
    texts = [TEXTS[index % len(TEXTS)] for index in range(size)]
    states = extract.run_batch([{"text": text} for text in texts], backend=backend, hints=hints)
    return [{**json.loads(state["person"]), "phone": state["phone"]} for state in states]


if __name__ == "__main__":
    print(json.dumps(run(rx.RuntimeEndpoint(sys.argv[1])), indent=2))
