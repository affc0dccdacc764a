"""The JSON of a request: read within bounds, and refused if reading it could hurt."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from pyfly_cpp.serve.api_errors import ApiError, bad_request
from pyfly_cpp.serve.reading import Reading
from pyfly_cpp.serve.requests import RequestBody
from pyfly_cpp.serve.settings import RequestLimits
from pyfly_cpp.serve.streams import while_there

T = TypeVar("T", bound=RequestBody)

_MOST_AT_ONCE = 4096
"""Bytes that are read in the event loop, where everybody waits for it."""
_STRING = re.compile(rb'"[^"]*"?')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MOST_DIGITS = 40

_WORDS = {
    "^Field required$": "is missing",
    "^(Input|String|List) should": "must",
    "^Value error, | after validation": "",
    r"dictionary( or instance of \w+)?": "object",
}
"""Words of pydantic's messages and their replacements."""

_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


@dataclass(frozen=True)
class Received(Generic[T]):
    """What a client has sent."""

    body: T
    n_bytes: int
    """As it came."""


async def read_json(request: Request, limits: RequestLimits, reading: Reading, model: type[T]) -> Received[T]:
    """Reads a request.

    Raises:
        ApiError: it is too large, too slow, no JSON object, or does not fit the model.
        ClientLeft: nobody waits for it.
    """
    try:
        content = await asyncio.wait_for(_read(request, limits.max_body), limits.read_seconds)
    except asyncio.TimeoutError:
        raise ApiError(408, "the request did not come whole in time; send it faster.") from None
    except ClientDisconnect:
        raise ApiError(499, "the client has left.") from None
    understand = functools.partial(_understand, content, limits, model)
    body = understand() if len(content) <= _MOST_AT_ONCE \
        else await while_there(request.receive, reading.run(len(content), understand))  # fmt: skip
    return Received(body, len(content))


def _understand(content: bytes, limits: RequestLimits, model: type[T]) -> T:
    return check(model, parse(content, limits.max_depth))


def check(model: type[T], value: dict[str, Any]) -> T:
    """The body that a value is. Raises ApiError 400, with the path of what is wrong, unless the model takes it."""
    try:
        return model.model_validate(value)
    except ValidationError as failure:
        errors = failure.errors(include_url=False, include_context=False)
        found = [(_keys(error, value), error) for error in errors if error["loc"][0] == errors[0]["loc"][0]]
        # Of the forms that a field may have, the one that fits furthest is meant.
        most = max(_fit(*one) for one in found)
        meant = [one for one in found if _fit(*one) == most]
        keys, error = meant[0]
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key[:64]}" for key in keys)[1:]
        words = " or ".join(dict.fromkeys(_worded(other["msg"]) for _, other in meant)).replace("or must be", "or")
        given = f", not {_shown(error['input'])}" if words.startswith("must be") else ""
        raise bad_request(f"{path} {words}{given}.", path) from None


def _fit(keys: list[int | str], error: ErrorDetails) -> tuple[bool, int, int]:
    """How well a form fits whose error this is: its type does, it fits deep inside, up to a late entry."""
    last = keys[-1]
    return not error["type"].endswith(("_type", "literal_error")), len(keys), last if isinstance(last, int) else 0


def _keys(error: ErrorDetails, value: Any) -> list[int | str]:
    """Where in the value an error is. Its own place also names the forms that were tried."""
    keys: list[int | str] = []
    for i, key in enumerate(error["loc"], 1):
        if isinstance(value, list) and isinstance(key, int):
            value = value[key]
        elif isinstance(value, dict) and (key in value or (error["type"] == "missing" and i == len(error["loc"]))):
            value = value.get(key)
        else:
            continue
        keys.append(key)
    return keys


def _worded(message: str) -> str:
    """A message of pydantic's, to stand behind the name of a field."""
    for theirs, ours in _WORDS.items():
        message = re.sub(theirs, ours, message)
    return message


def _shown(value: Any) -> str:
    """A value in an error: its kind if it may be long."""
    if isinstance(value, (dict, list, str)) and len(value) > 40:
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value).encode("utf-8", "replace").decode()[:80]


async def _read(request: Request, most: int) -> bytes:
    too_large = ApiError(413, f"the request has more than {most} bytes; send less.")
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > most):
        raise too_large
    parts: list[bytes] = []
    n = 0
    async for part in request.stream():
        n += len(part)
        if n > most:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def parse(content: bytes, max_depth: int) -> dict[str, Any]:
    """Reads a JSON object; raises ApiError 400."""
    # Escapes go first: a pattern that knows them takes memory for each of millions.
    bare = _STRING.sub(b"", content.replace(b"\\\\", b"").replace(b'\\"', b""))
    if np.cumsum(_STEPS[np.frombuffer(bare, dtype=np.uint8)], dtype=np.int32).max(initial=0) > max_depth:
        raise bad_request(f"the request is nested more than {max_depth} deep; make it flatter.")
    try:
        value = json.loads(content.decode("utf-8"), parse_constant=_refuse, parse_int=_integer, parse_float=_number)
    except UnicodeDecodeError as error:
        raise bad_request(f"the request is not UTF-8 at byte {error.start}; send it as UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the request is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(value, dict):
        raise bad_request("the request must be a JSON object.")
    if _SURROGATE.search(content):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise bad_request("the request has half of a surrogate pair; send valid Unicode.") from None
    return value


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number has more than {_MOST_DIGITS} digits")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number is too large")
    return value
