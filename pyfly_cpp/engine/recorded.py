"""`Recorded`: the records of an answer, as notebooks show them."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable
from typing import Any

from pyfly_cpp.engine.output import Characters
from pyfly_cpp.engine.stats import ORIGINS, Record

_COLOURS = {"matched": "#d7ecd9", "loose": "#ffd08a", "target": "#d5e3f5"}
_REJECTED = "#b3402f"


class Recorded(list[Record]):
    """A list of records, one for each token. A notebook shows the text of the answer, each token in the colour of its
    origin; pickled, it is a plain list."""

    def __init__(self, piece_of: Callable[[int], bytes] | None = None) -> None:
        """`piece_of`: the bytes of a token; None: notebooks show a plain list."""
        super().__init__()
        self._piece_of = piece_of

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([*self],)

    def _repr_html_(self) -> str | None:
        if self._piece_of is None or not self:
            return None
        characters = Characters(self._piece_of)
        try:
            tokens = "".join(self._shown(record, characters(record.token)) for record in self)
        except ValueError:  # the model is closed
            return None
        counts = Counter(record.origin for record in self)
        legend = ", ".join(_span(f"{counts[origin]} {origin}", _COLOURS[origin]) for origin in ORIGINS)
        n_rejected = sum(len(record.rejected) for record in self)
        return (
            f'<div style="white-space: pre-wrap">{tokens}</div>'
            f"<div>{legend}, {_deleted(f'{n_rejected} rejected')}</div>"
        )

    def _shown(self, record: Record, text: str) -> str:
        """A token, behind the drafts that were rejected in its place, whose line breaks must not break the answer's."""
        assert self._piece_of is not None
        rejected = (self._piece_of(token).decode("utf-8", "replace").replace("\n", "↵") for token in record.rejected)
        title = f"{record.origin}, probability {record.probability:.1%}"
        return "".join(map(_deleted, rejected)) + _span(text, _COLOURS[record.origin], title)


def _span(text: str, colour: str, title: str = "") -> str:
    return f'<span title="{title}" style="background: {colour}; color: #1d2125">{html.escape(text)}</span>'


def _deleted(text: str) -> str:
    return f'<del style="color: {_REJECTED}">{html.escape(text)}</del>'
