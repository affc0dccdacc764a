"""Functions that an answer may call: how the model is told of them, held to calling them, and understood."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pyfly_cpp.serve.errors import bad_request
from pyfly_cpp.serve.grammars import Constraint

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_BARE = ("{", "[", "```json")


class Call(NamedTuple):
    """A function that is called."""

    id: str
    name: str
    arguments: str
    """JSON."""


class Tools:
    """The functions of a request, and whether and how they are to be called."""

    def __init__(self, functions: Sequence[Mapping[str, Any]], choice: str, name: str | None, template: str) -> None:
        """
        Args:
            functions: name, description, parameters.
            choice: none, auto or required.
            name: Of the only one that may be called.
            template: The model's chat template.

        Raises:
            ApiError: there is no function of that name, or two have the same.
        """
        self.functions = {function["name"]: function for function in functions}
        if len(self.functions) < len(functions):
            raise bad_request("two of the tools have the same name; give them different names.", "tools")
        if name is not None and name not in self.functions:
            raise bad_request(f"tool_choice names {name!r}, and no tool has that name.", "tool_choice")
        if choice == "required" and not functions:
            raise bad_request("tool_choice asks for a call, and there are no tools; give some.", "tool_choice")
        self.choice = choice
        self.name = name
        self.is_native = "tools" in template
        self.has_markers = not self.is_native or OPEN in template
        self._key = "parameters" if not self.has_markers and '"parameters"' in template else "arguments"

    def prepare(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any] | None]:
        """The messages, and what the template is told of tools: one that knows none gets everything as text."""
        if self.is_native:
            wanted = list(self.functions.values()) if self.choice != "none" else []
            return messages, [{"type": "function", "function": function} for function in wanted] or None
        out = [_as_text(message) for message in messages]
        if self.functions and self.choice != "none":
            if out[0]["role"] == "system":
                out[0] = {**out[0], "content": f"{out[0]['content']}\n\n{self._description()}"}
            else:
                out.insert(0, {"role": "system", "content": self._description()})
        return out, None

    def _description(self) -> str:
        lines = [json.dumps(function, ensure_ascii=False) for function in self.functions.values()]
        return "\n".join((
            "You can call these functions, one JSON object for each:", *lines,
            "To call one, answer with its name and arguments between markers, and nothing else:",
            f'{OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{CLOSE}',
        ))  # fmt: skip

    def constraint(self) -> Constraint | None:
        """What an answer that must be a call follows."""
        if self.choice != "required":
            return None
        schemas, parts = [], {}
        for i, function in enumerate(self.functions.values()):
            if self.name is None or function["name"] == self.name:
                own = f"tool{i}"
                parts[own] = _moved(function.get("parameters") or {"type": "object", "properties": {}}, own)
                schemas.append({
                    "type": "object",
                    "properties": {"name": {"const": function["name"]}, self._key: {"$ref": f"#/$defs/{own}"}},
                    "required": ["name", self._key],
                })  # fmt: skip
        schema = {**(schemas[0] if len(schemas) == 1 else {"oneOf": schemas}), "$defs": parts}
        marks = (f"{OPEN}\n", f"\n{CLOSE}") if self.has_markers else ("", "")
        return Constraint("schema", json.dumps(schema), "tools", *marks)

    def read(self, text: str) -> list[Call]:
        """The calls in a text that is nothing but calls; none if it is something else."""
        text = text.strip()
        if text.startswith("```json"):
            text = text[7:].rstrip("`").strip()
        if text.startswith("<function="):
            return [call for match in _FUNCTION.finditer(text) for call in self._read_xml(*match.groups())]
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        calls = [self._read_json(entry) for entry in (value if isinstance(value, list) else [value])]
        found = [call for call in calls if call is not None]
        return found if len(found) == len(calls) else []

    def _read_json(self, value: Any) -> Call | None:
        if not isinstance(value, dict):
            return None
        name = value.get("name")
        arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(name, str) or name not in self.functions:
            return None
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return None
        return _call(name, arguments) if isinstance(arguments, dict) else None

    def _read_xml(self, name: str, inner: str) -> list[Call]:
        if name not in self.functions:
            return []
        properties = (self.functions[name].get("parameters") or {}).get("properties")
        arguments: dict[str, Any] = {}
        for match in _PARAMETER.finditer(inner):
            field, value = match.groups()
            schema = properties.get(field) if isinstance(properties, dict) else None
            arguments[field] = value
            if not (isinstance(schema, dict) and schema.get("type") == "string"):
                with contextlib.suppress(ValueError, RecursionError):
                    arguments[field] = json.loads(value)
        return [_call(name, arguments)]


class CallReader:
    """Splits an answer into its text and its calls, while it comes."""

    def __init__(self, tools: Tools, one_alone: bool) -> None:
        """`one_alone`: whether all calls but the first are dropped."""
        self._tools = tools
        self._one_alone = one_alone
        self._held = ""
        self._is_call = self._is_after_call = False
        self._has_text = False
        self.calls: list[Call] = []
        """Those that were read."""

    def add(self, text: str) -> str:
        """What of the text so far can be given out."""
        self._held += text
        out = ""
        while True:
            if self._is_call:
                inner, mark, rest = self._held.partition(CLOSE)
                if not mark:
                    break
                self._is_call = False
                out += self._take(inner, f"{OPEN}{inner}{mark}")
                self._held = rest
                self._is_after_call = True
                continue
            if self._is_after_call:
                self._held = self._held.lstrip("\n")
                self._is_after_call = not self._held
            before, mark, rest = self._held.partition(OPEN)
            if mark:
                out += before
                self._held, self._is_call = rest, True
                continue
            if not self._has_text and not out.strip() and not self.calls and self._looks_bare():
                break
            n = next((n for n in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:n])), 0)
            out += self._held[: len(self._held) - n]
            self._held = self._held[len(self._held) - n :]
            break
        self._has_text = self._has_text or bool(out.strip())
        return out

    def end(self) -> str:
        """The rest of the text."""
        held, self._held = self._held, ""
        if self._is_call:
            return self._take(held, OPEN + held)
        return self._take(held, held) if self._looks_bare(held) else held

    def _looks_bare(self, text: str | None = None) -> bool:
        """Whether this may be a call without markers."""
        text = (self._held if text is None else text).lstrip()
        return bool(text) and any(text.startswith(word) or word.startswith(text) for word in _BARE)

    def _take(self, inner: str, whole: str) -> str:
        calls = self._tools.read(inner)
        self.calls += calls
        if self._one_alone:
            del self.calls[1:]
        return "" if calls else whole


def _call(name: str, arguments: dict[str, Any]) -> Call:
    return Call(f"call_{uuid.uuid4().hex[:24]}", name, json.dumps(arguments, ensure_ascii=False))


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own parts still find them where it is a part itself."""
    if isinstance(schema, list):
        return [_moved(entry, place) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    out = {name: _moved(entry, place) for name, entry in schema.items()}
    reference = out.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        out["$ref"] = f"#/$defs/{place}{reference[1:]}"
    return out


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message for a template that knows no tools."""
    if message["role"] in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return {"role": message["role"], "content": message["content"]}
    texts = [f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in calls]
    return {"role": message["role"], "content": "\n".join([text for text in (message["content"], *texts) if text])}
