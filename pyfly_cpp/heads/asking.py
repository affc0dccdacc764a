"""Prompts that a target makes up itself: they vary more than templates do."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyfly_cpp.engine.markers import THOUGHTS
from pyfly_cpp.heads.built_in_prompts import for_prompts
from pyfly_cpp.heads.texts import N_PARALLEL, Tell, answers, open_batch
from pyfly_cpp.machine.files import resumable
from pyfly_cpp.machine.rows import read_lines_so_far

N_ASKED = 400
"""Most tokens of an answer with prompts."""

OF_REQUEST = 8
"""Mean number of prompts in an answer (measured with a 1.5B)."""

LENGTHS = range(20, 1001)
"""Characters of a prompt; shorter and longer ones are left out."""


def read_asked(path: Path) -> list[str]:
    """The prompts of a file that `ask_for_prompts` has written, each once."""
    return _prompts_of(read_lines_so_far(path)[0])


def _prompts_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(prompt for row in rows for prompt in row["prompts"]))


def ask_for_prompts(target: Path, path: Path, n: int, deadline: float, tell: Tell, **arguments: Any) -> None:
    """Asks the target for prompts about many subjects. Appends a line to a file for each answer: `request` and its
    `prompts`. Requests that the file has already are left out. Stops at n prompts, at the deadline (`time.monotonic`),
    when all requests are answered, or when the target turns out to make up few: less than one in an answer.

    Args:
        **arguments: Arguments of the target's `FlyBatch`.
    """
    rows, length = read_lines_so_far(path)
    found, done = set(_prompts_of(rows)), {row["request"] for row in rows}
    waiting = [request for request in for_prompts() if request not in done]

    def goes_on() -> bool:
        is_able = len(done) < N_PARALLEL or len(found) >= len(done)
        return len(found) < n and is_able and time.monotonic() < deadline

    def goes_on_and_tells() -> bool:
        tell("asking for prompts", min(len(found) / n, 1.0))
        return goes_on()

    if not waiting or not goes_on():
        return
    with resumable(path), path.open("ab") as file, open_batch(target, **arguments) as batch:
        file.truncate(length)
        while waiting and goes_on():
            n_now = -(-(n - len(found)) // OF_REQUEST)
            now = [(one, {"max_tokens": N_ASKED, "temperature": 0.7}) for one in waiting[:n_now]]
            del waiting[:n_now]
            for request, handle in answers(batch, iter(now), {}, goes_on_and_tells):
                prompts = _numbered(handle.result()["choices"][0])
                file.write(json.dumps({"request": request, "prompts": prompts}).encode() + b"\n")
                file.flush()
                found.update(prompts)
                done.add(request)


def _numbered(choice: dict[str, Any]) -> list[str]:
    """The numbered lines of an answer, without numbers and marks. Thoughts are left out, and the last line of an answer
    that was cut off."""
    text = choice["message"]["content"] or ""
    for opening, closing in THOUGHTS:
        text = text.rpartition(closing)[2]
        if opening in text:
            return []
    lines = text.replace("**", "").splitlines()
    whole = lines[:-1] if choice["finish_reason"] == "length" else lines
    found = (match[1] for line in whole if (match := re.fullmatch(r"\s*(?:\d+[.)]\s+)+(.+?)\s*", line)))
    bare = (prompt[1:-1] if prompt[0] == prompt[-1] == '"' else prompt for prompt in found)
    return [prompt for prompt in bare if len(prompt) in LENGTHS and not prompt.endswith(":")]
