"""One self-contained HTML page of one answer: how every token came, and what was rejected on the way.

The page has no script and loads nothing; everything that a model or a user wrote is escaped.
"""

from __future__ import annotations

import codecs
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

from pyfly_cpp._version import __version__
from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.stats import Record
from pyfly_cpp.errors import counted
from pyfly_cpp.measure.generator import Generated

_TEMPLATES = Path(__file__).with_name("templates")

_WHY = {
    "gate": "differs from the target's choice",
    "window": "its window broke",
    "boundary": "its window did not fit",
    "safety": "a protected, forbidden or as good as impossible token",
    "bonus": "nothing",
}

_FINISH = {
    "eog": "the model's end-of-text token",
    "stop": "a stop text",
    "length": "the limit of tokens",
    "context": "a full context",
}


Page = dict[str, Any]
"""The data of the template, by the names there."""


def make_page(
    generated: Generated,
    detokenize: Callable[[list[int]], bytes],
    is_special: Callable[[int], bool],
    prompt: str,
    setting: Decoding,
    model: str | os.PathLike[str],
    drafter: str = "",
) -> Page:
    """The page of a generation that was traced.

    Args:
        detokenize: From token ids to bytes, special tokens as their text.
        is_special: Whether a token is a control token.
    """
    records = generated.records
    origins = [record.origin for record in records]
    stats = generated.stats
    n_rejected = sum(len(record.rejected) for record in records)
    n_first = sum(bool(record.rejected) for record in records)
    numbers = [
        ("tokens", str(len(records))),
        ("steps", str(stats.rounds)),
        ("tokens per step", _number(stats.mean_accepted)),
        ("drafted, accepted", f"{stats.drafted}, {_number(100 * stats.acceptance, 0)}%"),
        ("loosely accepted", f"{stats.loose_accepted}, {_number(100 * stats.loose_rate, 1)}% of the tokens"),
        ("mean margin of loose tokens", f"{_number(stats.mean_margin_loose)} nats"),
        ("rejected by gate, window, boundary, safety",
         f"{stats.rejected_gate}, {stats.rejected_window}, {stats.rejected_boundary}, {stats.rejected_safety}"),
        ("drafts behind a rejected one", str(n_rejected - n_first)),
        ("taken back after a deferral",
         f"{counted(stats.rolled_back, 'token')} in {counted(stats.rollbacks, 'rollback')}"),
    ]  # fmt: skip
    if generated.decode_seconds > 0:
        numbers.append(("tokens per second", _number(generated.decode_tokens / generated.decode_seconds, 1)))
    return {
        "model": Path(model).name,
        "drafter": drafter,
        "setting": str(setting),
        "lossless": setting.is_exact,
        "drafts": "" if setting.is_plain else "governed" if setting.adaptive else "fixed",
        "prompt": prompt,
        "tokens": _tokens(records, detokenize, is_special),
        "finish": _FINISH[generated.finish],
        **{f"n_{origin}": origins.count(origin) for origin in ("matched", "loose", "target")},
        "n_rejected": n_rejected,
        "numbers": numbers,
        "version": __version__,
    }


def render(page: Page) -> str:
    """The page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("explain.html").render(page=page)


def _tokens(
    records: tuple[Record, ...], detokenize: Callable[[list[int]], bytes], is_special: Callable[[int], bool]
) -> list[dict[str, Any]]:
    """The data of each token. `text`: what it adds to the answer; None if its bytes are part of a
    character that a later token completes. `shown`: its own bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    out = []
    last_step = records[0].round if records else 0
    for i, record in enumerate(records):
        piece = detokenize([record.token])
        text = decoder.decode(piece, final=i == len(records) - 1)
        rejected = [detokenize([token]) for token in record.rejected]
        out.append({
            "text": text if text or not piece else None,
            "shown": visible(piece),
            "origin": record.origin,
            "special": is_special(record.token),
            "what": _what(record, has_draft=i > 0 and records[i - 1].round == record.round),
            "choice": visible(detokenize([record.choice])),
            "probability": _probability(record.probability),
            "entropy": _number(record.entropy),
            "margin": _number(record.margin),
            "step": record.round + 1,
            "depth": record.depth,
            "begins_step": record.round != last_step,
            # A line break of a rejected draft must not break the lines of the answer.
            "rejected": [draft.decode("utf-8", "replace").replace("\n", "↵") for draft in rejected],
            "rejected_shown": [visible(draft) for draft in rejected],
            "why": _WHY.get(record.reason, record.reason),
        })  # fmt: skip
        last_step = record.round
    return out


def _what(record: Record, has_draft: bool) -> str:
    """How a token was produced. `has_draft`: something of the same step stands before it."""
    if record.origin == "matched":
        return "drafted, and the target's choice"
    if record.origin == "loose":
        return "drafted and loosely accepted"
    if record.reason == "bonus":
        return "the target's own, " + ("after a draft that was accepted whole" if has_draft else "nothing was drafted")
    return f"the target's own, instead of a rejected draft ({_WHY.get(record.reason, record.reason)})"


def visible(piece: bytes) -> str:
    """A token's bytes with white space made visible; in hexadecimal where they are no text by themselves."""
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError:
        return " ".join(f"{byte:02X}" for byte in piece) + " (bytes)"
    return text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥") or "(nothing)"


def _number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


def _probability(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{100 * value:.1f}%" if value >= 0.001 else f"{value:.1e}"
