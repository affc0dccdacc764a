"""Instructions whose form can be checked by code: JSON of a schema, word limits, lists, words that must or must not be.

Generated from a seed, so they need no data file; the text is free, and only its form is judged.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from pyfly_cpp.evaluation.task import Item, Task, Verdict, Where

Check = dict[str, Any]
"""One condition: its name and what it asks for, as in `{"words": [20, 40]}`."""

_TOPICS = (
    "a lighthouse", "the water cycle", "a bicycle", "honey bees", "the Moon", "a public library", "bread", "volcanoes",
    "a railway station", "chess", "the human heart", "rain forests", "a compass", "sea turtles", "glass", "the violin",
    "earthquakes", "a kitchen garden", "coffee", "the Roman Empire", "windmills", "penguins", "paper", "a thunderstorm",
    "the bicycle pump", "photography", "salt", "a mountain village", "submarines", "the alphabet",
)  # fmt: skip

_GROUPS = (
    "fruits", "animals of the sea", "musical instruments", "things in a kitchen", "kinds of weather", "garden tools",
    "European countries", "sports with a ball", "parts of a ship", "things to pack for a journey", "vegetables",
    "jobs in a hospital", "board games", "birds", "metals", "pieces of furniture", "desserts", "languages", "trees",
    "planets and moons",
)  # fmt: skip

_NEEDED = ("river", "silver", "morning", "careful", "window", "because", "seven", "garden", "winter", "together")

_RECORDS: tuple[tuple[str, dict[str, Check]], ...] = (
    ("a book", {"title": {"type": "string"}, "year": {"type": "integer"}, "authors": {"type": "array"}}),
    ("a city", {"name": {"type": "string"}, "population": {"type": "integer"}, "capital": {"type": "boolean"}}),
    ("a recipe", {"dish": {"type": "string"}, "minutes": {"type": "integer"}, "ingredients": {"type": "array"}}),
    ("a train", {"number": {"type": "string"}, "platform": {"type": "integer"}, "stops": {"type": "array"}}),
    ("a film", {"title": {"type": "string"}, "rating": {"type": "number"}, "genres": {"type": "array"}}),
    ("a pet", {"name": {"type": "string"}, "age": {"type": "integer"}, "vaccinated": {"type": "boolean"}}),
    ("a parcel", {"id": {"type": "string"}, "weight_kg": {"type": "number"}, "express": {"type": "boolean"}}),
)

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
}  # fmt: skip


class Instructions(Task):
    """Rows: `id`, `prompt`, `checks` (a list of conditions, all of which must hold)."""

    name = "instructions"
    title = "instructions about the form of an answer, checked by code"
    max_tokens = 220
    criterion = "followed"

    def parse(self, where: Where) -> Item:
        """See Task."""
        checks = where.row.get("checks")
        if not isinstance(checks, list) or not checks:
            raise where.error("the field 'checks' must be a list of conditions.")
        for check in checks:
            name = next(iter(check), "") if isinstance(check, dict) and len(check) == 1 else ""
            if name not in CHECKS:
                raise where.error(f"unknown condition {check!r}; there are {', '.join(CHECKS)}.")
        return Item(where.text("id"), {"prompt": where.text("prompt"), "checks": checks})

    def generate(self, n: int, seed: int = 0) -> list[Item]:
        """n items, of each kind in turn; the same for the same seed, and the first ones for a smaller n."""
        items = []
        for i in range(n):
            rng = random.Random(f"{seed}/{i}")
            prompt, checks = _KINDS[i % len(_KINDS)](rng)
            items.append(Item(f"instructions-{seed}-{i}", {"prompt": prompt, "checks": checks}))
        return items

    def question(self, item: Item) -> str:
        """See Task."""
        return str(item.fields["prompt"])

    def score(self, item: Item, text: str, tokens: Sequence[int]) -> Verdict:
        """Correct: all conditions hold. Extracted: the names of those that do not."""
        failed = [
            name for check in item.fields["checks"] for name, asked in check.items() if not holds(name, asked, text)
        ]
        return Verdict(not failed, ", ".join(failed), "", {"failed": failed})


# ---- What is asked ---------------------------------------------------------------------------------------------------


def _words(rng: random.Random) -> tuple[str, list[Check]]:
    topic = rng.choice(_TOPICS)
    if rng.random() < 0.5:
        n = rng.choice((15, 20, 25, 30))
        return f"Describe {topic} in at most {n} words.", [{"words": [5, n]}]
    low = rng.choice((20, 30, 40))
    return f"Describe {topic} in {low} to {low + 20} words.", [{"words": [low, low + 20]}]


def _list(rng: random.Random) -> tuple[str, list[Check]]:
    group, n = rng.choice(_GROUPS), rng.randint(3, 7)
    if rng.random() < 0.5:
        form = 'Number the lines "1.", "2." and so on, and write nothing else.'
        return f"List exactly {n} {group}, one on a line. {form}", [{"lines": n}, {"numbered": n}]
    form = 'Begin every line with "- ", and write nothing else.'
    return f"List exactly {n} {group}, one on a line. {form}", [{"lines": n}, {"prefix": "- "}]


def _json(rng: random.Random) -> tuple[str, list[Check]]:
    thing, fields = rng.choice(_RECORDS)
    fields = {name: dict(schema) for name, schema in fields.items()}
    described = []
    for name, schema in fields.items():
        kind = schema["type"]
        if kind == "array":
            schema["items"] = {"type": "string"}
            schema["minItems"] = schema["maxItems"] = rng.randint(2, 4)
            described.append(f'"{name}" (a list of exactly {schema["minItems"]} texts)')
        elif kind in ("integer", "number"):
            schema["minimum"] = 1
            described.append(f'"{name}" ({"a whole number" if kind == "integer" else "a number"} of at least 1)')
        else:
            described.append(f'"{name}" ({"a text" if kind == "string" else "true or false"})')
    status = rng.sample(("new", "sold", "lost", "open", "closed"), 3)
    fields["status"] = {"enum": status}
    described.append('"status" (one of ' + ", ".join(f'"{word}"' for word in status) + ")")
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    prompt = f"Invent {thing}. Answer with one JSON object and nothing else, with exactly these fields: "
    return prompt + ", ".join(described) + ".", [{"json": schema}]


def _sentences(rng: random.Random) -> tuple[str, list[Check]]:
    topic, n = rng.choice(_TOPICS), rng.randint(2, 4)
    needed = rng.sample(_NEEDED, 2)
    prompt = f'Write exactly {n} sentences about {topic}. Use the words "{needed[0]}" and "{needed[1]}".'
    checks: list[Check] = [{"sentences": n}, {"contains": needed}]
    if rng.random() < 0.5:
        prompt += " Do not use commas."
        checks.append({"lacks": ","})
    return prompt, checks


def _table(rng: random.Random) -> tuple[str, list[Check]]:
    group, n = rng.choice(_GROUPS), rng.randint(3, 5)
    columns = ["name", *rng.sample(("colour", "size", "origin", "price", "use"), 2)]
    return (
        f"Make a CSV table of {n} {group} with the columns {', '.join(columns)}. Write the line with the names of the "
        f"columns, then the {n} lines, with commas between the columns and no other commas, and nothing else.",
        [{"csv": {"columns": columns, "rows": n}}],
    )


_KINDS: tuple[Callable[[random.Random], tuple[str, list[Check]]], ...] = (_words, _list, _json, _sentences, _table)

# ---- Whether it holds ------------------------------------------------------------------------------------------------


def holds(name: str, asked: Any, text: str) -> bool:
    """Whether a condition holds for an answer; a fence around all of it, as chat models like it, is left out."""
    fenced = re.fullmatch(r"\s*```\w*\n(.*?)\n?```\s*", text, re.S)
    return CHECKS[name](asked, (fenced[1] if fenced else text).strip())


def _has_words(asked: list[int], text: str) -> bool:
    low, high = asked
    return low <= len(text.split()) <= high


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _is_numbered(asked: int, text: str) -> bool:
    return all(re.match(rf"{i}\.\s+\S", line) for i, line in enumerate(_lines(text)[:asked], 1))


def _has_sentences(asked: int, text: str) -> bool:
    return len(re.findall(r"[.!?]+['\")]*(?=\s|$)", text)) == asked and re.search(r"[.!?]+['\")]*$", text) is not None


def _has_all(asked: list[str], text: str) -> bool:
    return all(re.search(rf"\b{re.escape(word)}\b", text, re.I) for word in asked)


def _is_csv(asked: dict[str, Any], text: str) -> bool:
    rows = [[cell.strip() for cell in line.split(",")] for line in _lines(text)]
    names = [cell.lower() for cell in rows[0]] if rows else []
    whole = all(len(row) == len(asked["columns"]) and all(row) for row in rows)
    return names == asked["columns"] and len(rows) == asked["rows"] + 1 and whole


def _is_json(asked: Check, text: str) -> bool:
    try:
        return fits(asked, json.loads(text))
    except (ValueError, RecursionError):
        return False


def fits(schema: Check, value: Any) -> bool:
    """Whether a value is of a JSON schema, of those words of the language that the items use."""
    if "enum" in schema and value not in schema["enum"]:
        return False
    kind = schema.get("type")
    if kind == "object":
        known = schema.get("properties", {})
        return (
            isinstance(value, dict)
            and all(name in value for name in schema.get("required", ()))
            and (schema.get("additionalProperties", True) or all(name in known for name in value))
            and all(fits(known[name], entry) for name, entry in value.items() if name in known)
        )
    if kind is not None and (
        not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind in ("integer", "number"))
    ):
        return False
    if kind == "array":
        n = len(value)
        return schema.get("minItems", 0) <= n <= schema.get("maxItems", n) and all(
            fits(schema.get("items", {}), entry) for entry in value
        )
    return not (kind in ("integer", "number") and value < schema.get("minimum", value))


CHECKS: dict[str, Callable[[Any, str], bool]] = {
    "words": _has_words,
    "lines": lambda asked, text: len(_lines(text)) == asked,
    "numbered": _is_numbered,
    "prefix": lambda asked, text: all(line.startswith(asked) for line in _lines(text)),
    "json": _is_json,
    "sentences": _has_sentences,
    "contains": _has_all,
    "lacks": lambda asked, text: asked not in text,
    "csv": _is_csv,
}
"""All conditions by their names: whether what is asked for holds for a text."""
