"""Functions that an answer may call: how the model is told of them, held to calling them, and understood."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pyfly_cpp.engine.markers import CLOSE, END_FUNCTION, END_PARAMETER, FUNCTION, OPEN, PARAMETER
from pyfly_cpp.grammar.schemas import Framed, as_json
from pyfly_cpp.serve.api_errors import bad_request
from pyfly_cpp.serve.grammars import Constraint

NO_OBJECT = "INVALID_JSON"
"""The key under which Anthropic's documentation has clients keep arguments that are no object."""
_DECODER = json.JSONDecoder(strict=False)  # line ends in strings as they may come
_KEYS = ("name", "arguments", "parameters", "type", "id")
_BEFORE = r"\s*(?:```json\s*)?(?:\[\s*)?"
_BEFORE_KEY = re.compile(_BEFORE + r"(?:\{\s*)?")
_BEGUN = re.compile(_BEFORE + r'\{\s*"(?P<key>[^"\\]*)(?:(?P<end>")\s*(?::\s*(?:"(?P<name>[^"\\]*))?)?)?')
_FUNCTION = re.compile(rf"{FUNCTION}([^>\n]+)>")
_PART = re.compile(rf"{PARAMETER}([^>\n]+)>\n?|{END_FUNCTION}")
_VALUE = re.compile(rf"(.*?)\n?{END_PARAMETER}(?=\s*(?:{PARAMETER}|{END_FUNCTION}))", re.DOTALL)


class Call(NamedTuple):
    """A function that is called."""

    id: str
    name: str
    arguments: str
    """JSON; the beginning of it if the call breaks off."""

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are an object."""
        try:
            return isinstance(_json(self.arguments), dict)
        except (ValueError, RecursionError):
            return False


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
        out = _as_texts(messages)
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

    def constraint(self, are_many: bool) -> Constraint:
        """What calls follow; `are_many`: whether there may be several."""
        around = (f"{OPEN}\n", f"\n{CLOSE}") if self.has_markers else ("", "")
        framed = [
            Framed(function.get("parameters") or {"type": "object", "properties": {}}, *around, name, (name, self._key))
            for name, function in self.functions.items()
            if self.name is None or name == self.name
        ]
        return Constraint("schema", json.dumps(framed), "tools", are_many)

    def may_begin(self, text: str) -> bool:
        """Whether a text without an opening marker may still become a call, as far as its first key shows."""
        begun = _BEGUN.match(text)
        if begun is None:
            return _BEFORE_KEY.fullmatch(text) is not None or text.lstrip().startswith(FUNCTION)
        key, name = begun["key"], begun["name"]
        if begun["end"] is None:
            return any(word.startswith(key) for word in _KEYS)
        return key in _KEYS and (key != "name" or name is None or any(own.startswith(name) for own in self.functions))

    def read(self, text: str) -> list[Call]:
        """The calls in a text that is nothing but calls; none if it is something else."""
        text = text.strip()
        if text.startswith("```json"):
            text = text[7:].rstrip("`").strip()
        try:
            calls = self._read_xml(text) if text.startswith(FUNCTION) else self._read_json(text)
        except (ValueError, RecursionError):
            return []
        are_known = all(
            isinstance(name, str) and name in self.functions and isinstance(arguments, dict)
            for name, arguments in calls
        )
        return [new_call(name, as_json(arguments)) for name, arguments in calls] if are_known else []

    def _read_json(self, text: str) -> list[tuple[Any, Any]]:
        calls: list[tuple[Any, Any]] = []
        while text:  # several may stand behind each other
            value, n = _DECODER.raw_decode(text)
            json.dumps(value, allow_nan=False)
            calls += [_named(entry) for entry in (value if isinstance(value, list) else [value])]
            text = text[n:].lstrip(" \t\r\n;,")
        return calls

    def _read_xml(self, text: str) -> list[tuple[Any, Any]]:
        calls: list[tuple[Any, Any]] = []
        place = 0
        while (head := _FUNCTION.search(text, place)) is not None:
            place = head.end()
            arguments: dict[str, Any] = {}
            while (part := _PART.search(text, place)) is not None and part[1] is not None:
                value = _VALUE.match(text, part.end())
                if value is None:
                    raise ValueError("a value does not end")
                arguments[part[1]] = self._value_of(head[1], part[1], value[1])
                place = value.end()
            if part is None:
                raise ValueError("a call does not end")
            place = part.end()
            calls.append((head[1], arguments))
        return calls

    def _value_of(self, function: str, name: str, text: str) -> Any:
        """A parameter's value: the value of what looks like JSON, unless a text is wanted."""
        properties = (self.functions.get(function, {}).get("parameters") or {}).get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        if not (isinstance(schema, dict) and schema.get("type") == "string"):
            with contextlib.suppress(ValueError, RecursionError):
                return _json(text)
        return text


def _json(text: str) -> Any:
    """A value that a model wrote, with line ends in strings as they may come. Raises ValueError: it is no JSON, or has
    a number that JSON cannot hold."""
    value, n = _DECODER.raw_decode(text)
    if text[n:].strip():
        raise ValueError("there is something after it")
    json.dumps(value, allow_nan=False)
    return value


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; what is none, such as those of a call that was cut off, as a text in one.
    Templates take objects alone, and a history with a broken call is to be served."""
    try:
        value = _json(text.strip()) if text.strip() else {}
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        return {NO_OBJECT: text}
    return {} if value is None else value if isinstance(value, dict) else {NO_OBJECT: text}


def _named(value: Any) -> tuple[Any, Any]:
    """The function and the arguments of a call that is an object; (None, None) of what is no call."""
    if not isinstance(value, dict):
        return None, None
    has_none = "arguments" not in value and "parameters" not in value
    if has_none and value.keys() - {"name", "type", "id"}:  # something else that has a name
        return None, None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments) if arguments.strip() else None
    return value.get("name"), {} if arguments is None else arguments


def new_call(name: str, arguments: str) -> Call:
    """A call with an id of its own; `arguments`: JSON."""
    return Call(f"call_{uuid.uuid4().hex[:24]}", name, arguments)


def _as_texts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools. Results are the user's: with what follows them they are one message,
    as many templates refuse two in a row."""
    out: list[dict[str, Any]] = []
    is_after_result = False
    for message in messages:
        text = _as_text(message)
        if is_after_result and text["role"] == "user":
            out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n{text['content']}"}
        else:
            out.append(text)
        is_after_result = text["role"] == "user" and (message["role"] == "tool" or is_after_result)
    return out


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return {"role": message["role"], "content": message["content"]}
    texts = [f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in calls]
    return {"role": message["role"], "content": "\n".join([text for text in (message["content"], *texts) if text])}
