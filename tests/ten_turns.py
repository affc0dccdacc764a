"""A session of an agent, as messages: what changes between its turns, and how little of each prompt is new."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

SYSTEM = "You solve sums, and explain each step. " * 12
THOUGHT = "I think of the apples one by one, and of the baskets that they lie in. " * 3
NEAR = 100
"""Tokens of a recurrent model that may be read again: those behind the nearest state that was kept."""


def ten_turns() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """What happened since the turn before, and the messages that are sent then."""
    messages = [{"role": "system", "content": SYSTEM}]
    for i in range(10):
        happened = "a question"
        messages.append({"role": "user", "content": f"Tom has {i + 3} apples and buys {2 * i + 1} more. " * 4})
        if i == 3:
            happened = "a result of a tool is inserted in the middle"
            messages.insert(3, {"role": "user", "content": "Result: seven apples are in the basket. " * 3})
        elif i == 5:
            happened = "thoughts are left out"
            messages = [{**one, "content": one["content"].replace(THOUGHT, "")} for one in messages]
        elif i == 7:
            happened = "the beginning changes"
            messages[0] = {"role": "system", "content": "Today is Tuesday. " + SYSTEM}
        yield happened, [dict(one) for one in messages]
        if i == 8:
            yield "the same again", [dict(one) for one in messages]
        messages.append({"role": "assistant", "content": f"{THOUGHT if i == 4 else ''}Tom has {3 * i + 4}."})


def as_text(messages: list[dict[str, str]]) -> str:
    """The prompt, in the format chatml."""
    said = (f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
    return "".join(said) + "<|im_start|>assistant\n"


def n_new(prompt: list[int], before: list[int]) -> int:
    """Tokens of a prompt that the one before did not begin with; at least the last one, whose row is wanted."""
    n_alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, before)))
    return max(1, len(prompt) - n_alike)
