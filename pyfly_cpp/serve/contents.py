"""What stands in messages and prompts: a text, or an object or parts that have one."""

from __future__ import annotations

from typing import Any

from pyfly_cpp.serve.api_errors import bad_request


def read_content(content: Any, path: str) -> str:
    """The text of a message. Raises ApiError: it has something else than text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise bad_request(f"{path} has a part of the type {part.type[:40]!r}; this server takes text.", path)
        texts.append(part.text or "")
    return "".join(texts)


def read_object(prompt: Any, path: str) -> str:
    """The text of a prompt that is an object: its `prompt_string`, or the parts of its `content`. Raises ApiError."""
    if prompt.multimodal_data:
        raise bad_request(f"{path} has multimodal_data; this server takes text.", path)
    if prompt.prompt_string is not None:
        return str(prompt.prompt_string)
    if not prompt.content:
        raise bad_request(f"{path} has neither prompt_string nor content; give one of them.", path)
    return read_content(prompt.content, path)


def listed(prompt: Any) -> list[Any]:
    """A list of prompts, whatever form it had: a list in which a token stands is one prompt."""
    if not isinstance(prompt, list) or not {int, float}.isdisjoint(map(type, prompt)):
        return [prompt]
    return list(prompt)
