"""The deferral window: the condition under which a deferred mismatch stands.

On the command line and in settings a window is written as in `str(window)`: `reconverge:6`, `agree:5 tail=6`,
`reconverge:6 in-round`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pyfly_cpp.ranges import is_integer, require_integer


class WindowRule(NamedTuple):
    """The meaning of a rule's word. The decisions are made in `csrc/window.cpp`."""

    across_steps: bool
    """Whether its windows outlive their step by default."""
    needed: Callable[[int, bool], int]
    """From W, and whether the window may outlive its step: the drafts that must follow a mismatch in its step."""


RULES = {
    # Across steps the bonus comes before the next draft, which W = 1 does not reach.
    "agree": WindowRule(False, lambda size, across: size),
    "reconverge": WindowRule(True, lambda size, across: 0 if across and size > 1 else min(size, 1)),
}
"""All rules by their words."""

WORDS = (*RULES, "across", "in-round", "tail=", "window=")
"""First words of a written window; `window=W` is the size alone."""


@dataclass(frozen=True)
class Window:
    """Conditions on the `size` positions after a deferred mismatch. If the text ends before they are decided, the
    mismatch is rejected, and the text continues with the target's own choice."""

    size: int = 6
    """W of the FLy paper, positions, >= 0. 0 lets every deferred mismatch stand immediately."""

    rule: str = "agree"
    """`"agree"` (FLy paper, Eq. 8-9): the next W positions are all drafted and all match. `"reconverge"`: one drafted
    position among the next W matches; before a step without a draft, undecided mismatches are rejected. Agree suits
    long drafts (K > W). No gate has reconverge by default: it took back hardly a token
    (docs/design/verification.md)."""

    tail: int | None = None
    """The last `tail` positions of a step are strict, >= 0. None: as many as the rule needs. The FLy reference code
    with `win_len` L is `Window(size=L - 1, tail=L)`."""

    across_rounds: bool | None = None
    """Whether an undecided mismatch survives its step as provisional: kept in the caches, withheld from the caller,
    taken back if its window breaks. None: False for agree, which takes no other value, True for reconverge."""

    def __post_init__(self) -> None:
        require_integer("the window's size", self.size, 0)
        if not isinstance(self.rule, str) or self.rule not in RULES:
            raise ValueError(f"the window's rule must be {' or '.join(map(repr, RULES))}, not {self.rule!r}.")
        if self.tail is not None and not (is_integer(self.tail) and 0 <= self.tail <= 2**31 - 1):
            raise ValueError(f"the window's tail must be an integer >= 0 or None, not {self.tail!r}.")
        if self.across_rounds is not None and not isinstance(self.across_rounds, bool):
            raise ValueError(f"across_rounds must be True, False or None, not {self.across_rounds!r}.")
        if self.rule == "agree" and self.across_rounds:
            raise ValueError(
                "a window under agree ends with its step; leave out across, or take the rule reconverge, whose window "
                "may be decided in later steps."
            )

    @property
    def outlives_step(self) -> bool:
        """`across_rounds` with its default filled in."""
        return RULES[self.rule].across_steps if self.across_rounds is None else self.across_rounds

    @property
    def n_strict(self) -> int:
        """The last positions of a step at which no mismatch can stand, >= 0."""
        return max(RULES[self.rule].needed(self.size, self.outlives_step), self.tail or 0)

    def config(self) -> tuple[int, str, int, bool]:
        """(size, rule, tail, across_steps): `pyfly_window_config` of pyfly.h."""
        return self.size, self.rule, -1 if self.tail is None else self.tail, self.outlives_step

    def but(self, **fields: Any) -> Window:
        """This window with other fields. One without positions gets the usual number of them with a rule for them."""
        if self.size == 0 and "rule" in fields and "size" not in fields:
            fields["size"] = Window().size
        if fields.get("rule") == "agree":
            fields.setdefault("across_rounds", None)
        return replace(self, **fields)

    def with_word(self, word: str) -> Window | None:
        """This window, changed by one word of a written window; None if it is no such word.

        Raises:
            ValueError: the word lacks its number.
        """
        name, separator, value = word.replace("=", ":", 1).partition(":")
        if name in RULES:
            return self.but(rule=name, size=whole(word, value)) if separator else self.but(rule=name)
        if name == "tail" and separator:
            return replace(self, tail=whole(word, value))
        if name == "window" and separator:
            return replace(self, size=whole(word, value))
        if word in ("across", "in-round"):
            return replace(self, across_rounds=word == "across")
        return None

    def but_written(self, text: str) -> Window:
        """This window, changed by the words of a written one; a number alone is the size. Raises ValueError."""
        window = self
        for word in text.split():
            changed = window.with_word(f"window={word}" if word.isdecimal() else word)
            if changed is None:
                raise ValueError(f"unknown word {word!r} of a window; the words are {', '.join(WORDS)} and a size.")
            window = changed
        return window

    def __str__(self) -> str:
        words = [f"{self.rule}:{self.size}"]
        if self.tail is not None:
            words.append(f"tail={self.tail}")
        if self.across_rounds is not None:
            words.append("across" if self.across_rounds else "in-round")
        return " ".join(words)


def require_window(window: object) -> Window | None:
    """Returns `window` if it is one (an object or its written form), or None, which stands for the gate's own; raises
    ValueError otherwise."""
    if isinstance(window, str):
        return parse_window(window)
    if window is not None and not isinstance(window, Window):
        raise ValueError(f"window must be Window(...), a string such as reconverge:6, or None, not {window!r}.")
    return window


def parse_window(text: str) -> Window:
    """Reads a window as `str` writes it: the rule with its size first; raises ValueError."""
    window: Window | None = None
    for word in text.split():
        is_rule = word.partition(":")[0] in RULES
        window = (window or Window()).with_word(word) if is_rule == (window is None) else None
        if window is None:
            break
    if window is None:
        raise ValueError(
            f"cannot read the window {text!r}; write {' or '.join(f'{rule}:{Window().size}' for rule in RULES)}, "
            "followed by tail=N, across or in-round if needed."
        )
    return window


def whole(word: str, value: str) -> int:
    """The number behind a word; raises ValueError."""
    if not (value.isascii() and value.isdigit()) or int(value) > 2**31 - 1:
        raise ValueError(f"{word!r} needs a whole number >= 0.")
    return int(value)
