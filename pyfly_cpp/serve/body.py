"""The JSON of a request: read within bounds, and refused where reading it could hurt."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect, Request

from pyfly_cpp.serve.checking import Schema, check
from pyfly_cpp.serve.errors import ApiError, bad_request
from pyfly_cpp.serve.settings import Limits

_MOST_AT_ONCE = 4096
"""Bytes that are read in the event loop, where everybody waits for it."""
_STRING = re.compile(rb'"[^"]*"?')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MOST_DIGITS = 40

_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


async def read_json(request: Request, limits: Limits, schema: Schema) -> dict[str, Any]:
    """The object that a request consists of.

    Raises:
        ApiError: it is too large, too slow, no JSON object, or does not fit the schema.
    """
    try:
        content = await asyncio.wait_for(_read(request, limits.max_body), limits.read_seconds)
    except asyncio.TimeoutError:
        raise ApiError(408, "the request did not come whole in time; send it faster.") from None
    except ClientDisconnect:
        raise ApiError(499, "the client has left.") from None
    if len(content) <= _MOST_AT_ONCE:
        return _understand(content, limits, schema)
    return await asyncio.to_thread(_understand, content, limits, schema)


def _understand(content: bytes, limits: Limits, schema: Schema) -> dict[str, Any]:
    value = parse(content, limits.max_depth)
    check(schema, value)
    return value


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
