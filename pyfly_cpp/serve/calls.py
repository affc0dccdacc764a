"""Calls in an answer: where each begins and ends, while the answer is written.

A mark inside a string, or inside a parameter's value, is part of the call.
"""

from __future__ import annotations

import json
import re

from pyfly_cpp.engine.markers import CLOSE, END_FUNCTION, END_PARAMETER, FUNCTION, OPEN, PARAMETER, n_begun
from pyfly_cpp.serve.tools import Call, Tools, new_call

_BETWEEN = frozenset(" \t\r\n,:0123456789+-.eEtrufalsn")
"""Characters of JSON outside of strings and brackets."""
_MOST_RESTARTS = 16  # each reads the rest of the answer again


def _begun(*words: str) -> str:
    """A pattern of the beginnings of words, at the end of a text."""
    return rf"(?:{'|'.join(re.escape(word[:n]) for word in words for n in range(1, len(word)))})\Z"


_MARK = f"(?P<mark>{OPEN}|{CLOSE})"
_AFTER_VALUE = rf"{END_PARAMETER}\s*"
_JSON = (
    re.compile(rf'{_MARK}|(?P<turn>")|(?P<wait>{_begun(OPEN, CLOSE)})|[^"<]+|<'),
    re.compile(r'(?P<turn>")|(?P<wait>\\\Z)|\\.|[^"\\]+', re.DOTALL),
)
_XML = (
    re.compile(rf"{_MARK}|(?P<turn>{PARAMETER})|(?P<wait>{_begun(OPEN, CLOSE, PARAMETER)})|[^<]+|<"),
    re.compile(
        rf"(?P<turn>{_AFTER_VALUE}(?={PARAMETER}|{END_FUNCTION}))"
        rf"|(?P<wait>{_begun(END_PARAMETER)}|{_AFTER_VALUE}(?:\Z|{_begun(PARAMETER, END_FUNCTION)}))|[^<]+|<"
    ),
)
_OTHER = (re.compile(rf"{_MARK}|(?P<wait>{_begun(OPEN, CLOSE)})|[^<]+|<"),)
_FORMS = {"{": _JSON, "[": _JSON, "```json": _JSON, FUNCTION: _XML}
"""How calls begin, and the patterns of their parts: outside and inside of strings or values."""
_HEAD = re.compile(r'\s*(?:```json\s*)?\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_END = re.compile(r"\A\s*\}?\s*(?:```)?\s*")
_BEHIND_CALL = re.compile(rf"(?:\n|{CLOSE})+")  # it may be closed twice


class CallReader:
    """Splits an answer into its text and its calls, while it comes."""

    def __init__(self, tools: Tools, one_alone: bool) -> None:
        """`one_alone`: whether all calls but the first are dropped."""
        self._tools = tools
        self._one_alone = one_alone
        self._held = ""
        self._open: _Open | None = None  # what is held may be a call
        self._written: _Arguments | None = None  # what is held is the last of the calls
        self._is_after_call = self._has_text = False
        self._n_restarts = 0
        self.calls: list[Call] = []
        """Those that were read. The arguments of the last one may continue."""

    def add(self, text: str) -> str:
        """The part of the text so far that can be given out."""
        self._held += text
        if self._open is not None and not self._open.mark and not self._tools.may_begin(self._held):
            self._open, self._has_text = None, True
        out = self._pass()
        self._write()
        while self._open is not None and (mark := self._open.next_mark(self._held)) is not None:
            out += self._close(mark.start(), mark.end())
            out += self._pass()
            self._write()
        return out

    def end(self) -> str:
        """The rest of the text."""
        out = ""
        while self._open is not None:  # the answer may break off within a closing marker
            n = len(self._held)
            out += self._close(n - n_begun(self._held, CLOSE), n)
            out += self.add("")
        held, self._held = self._held, ""
        return out + ("" if self._is_after_call else held)

    def _pass(self) -> str:
        """Text that no call can begin with; stands before one then, or waits for more."""
        if self._open is not None:
            return ""
        if self._is_after_call:
            behind = _BEHIND_CALL.match(self._held)
            self._held = self._held[behind.end() :] if behind else self._held
            if CLOSE.startswith(self._held):
                return ""
            self._is_after_call = False
        if not self._has_text and not self.calls:
            form, is_known = _form_of(self._held)
            if form is not None and self._tools.may_begin(self._held):
                self._open = _Open("")
            if self._open is not None or not is_known:
                return ""
        before, mark, rest = self._held.partition(OPEN)
        if mark:
            self._held, self._open = rest, _Open(OPEN)
        else:
            n = len(self._held) - n_begun(self._held, OPEN)
            before, self._held = self._held[:n], self._held[n:]
        return self._give(before)

    def _write(self) -> None:
        """Arguments, as far as they are there: behind a name that is known they are a call's."""
        if self._open is None:
            return
        if self._written is None:
            head = _HEAD.match(self._held)
            if head is None or head[1] not in self._tools.functions or (self._one_alone and self.calls):
                return
            self._written = _Arguments(head.end())
            self.calls.append(new_call(head[1], ""))
        last = self.calls[-1]
        self.calls[-1] = last._replace(arguments=last.arguments + self._written.add(self._held))

    def _close(self, start: int, end: int) -> str:
        """What is held is a call up to `start`, where a mark stands up to `end`; or else text, up to the next opening
        if there is one."""
        assert self._open is not None
        held, own = self._held, self._open
        calls = self._tools.read(held[:start])
        rest = ""
        if calls or self._written is not None:
            if self._written is not None and not calls:  # it breaks off, or text follows it
                rest = _END.sub("", self._written.behind(held[:start]))
            self.calls += calls if self._written is None else calls[1:]
            self._written = None
            if self._one_alone:
                del self.calls[1:]
            self._held = held[start if held.startswith(OPEN, start) else end :]
            self._open, self._is_after_call = None, True
            return self._give(rest)
        place = held.find(OPEN, 0 if self._n_restarts < _MOST_RESTARTS else start, end)
        if place < 0:
            self._held, self._open = held[end:], None
            return self._give(own.mark + held[:end])
        self._n_restarts += place < start
        before, self._held = held[:place], held[place + len(OPEN) :]
        is_doubled = bool(own.mark) and not before.strip()
        self._open = _Open(f"{own.mark}{before}{OPEN}" if is_doubled else OPEN)
        return "" if is_doubled else self._give(own.mark + before)

    def _give(self, text: str) -> str:
        self._has_text = self._has_text or bool(text.strip())
        return text


class _Open:
    """A possible call that has not ended."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        """What stands before it, and belongs to the text if it is none."""
        self._form: tuple[re.Pattern[str], ...] | None = None
        self._place = 0
        self._is_inside = False  # a string or a value

    def next_mark(self, held: str) -> re.Match[str] | None:
        """The next mark that ends it or begins another, once it is there. `held`: the same text as before, or more."""
        if self._form is None:
            form, is_known = _form_of(held)
            if not is_known:
                return None
            self._form = form or _OTHER
        while self._place < len(held):
            part = self._form[self._is_inside].match(held, self._place)
            assert part is not None
            if part.lastgroup == "mark":
                return part
            if part.lastgroup == "wait":
                break
            self._is_inside ^= part.lastgroup == "turn"
            self._place = part.end()
        return None


class _Arguments:
    """Reads the arguments of a call while they are written: an object, up to its end or what cannot stand in one."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._depth = 0
        self._is_inside = self._is_escaped = False  # of a string
        self._is_over = False

    def add(self, held: str) -> str:
        """The characters that are new. `held`: the same text as before, or more."""
        out = []
        while self._place < len(held) and not self._is_over:
            c = held[self._place]
            if self._is_inside:
                self._is_inside = self._is_escaped or c != '"'
                self._is_escaped = not self._is_escaped and c == "\\"
                c = json.dumps(c)[1:-1] if c < " " else c
            elif c == '"':
                self._is_inside = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                self._is_over = self._depth == 0
            elif c not in _BETWEEN:
                self._is_over = True
                break
            out.append(c)
            self._place += 1
        return "".join(out)

    def behind(self, held: str) -> str:
        """What stands behind a whole object; nothing behind one that breaks off."""
        return held[self._place :] if self._is_over and self._depth == 0 else ""


def _form_of(text: str) -> tuple[tuple[re.Pattern[str], ...] | None, bool]:
    """The form of the call that a text begins with, and whether it is known yet."""
    text = text.lstrip()
    form = next((form for word, form in _FORMS.items() if text.startswith(word)), None)
    return form, form is not None or not any(word.startswith(text) for word in _FORMS)
