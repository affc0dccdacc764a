"""Log-probabilities of completions, from single logits rows: no `logits_all` buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]


class LogprobCollector:
    """Reduces each row to what a response shows of it: the token's own log-probability and the `n_top` largest ones."""

    def __init__(self, n_top: int) -> None:
        self.n_top = n_top
        self.tokens: list[int] = []
        """The tokens, in order."""
        self.entries: list[tuple[float, list[tuple[int, float]]]] = []
        """For each token: ln p(token), and (token id, ln p) of the most probable ones, by falling probability."""

    def add(self, row: Row, token: int) -> None:
        """Adds a raw logits row [V] and the token that came of it."""
        self.tokens.append(token)
        n_top = min(self.n_top, row.shape[0])
        peak = float(row.max())
        log_sum = peak + float(np.log(np.exp((row - peak).astype(np.float64)).sum()))
        top: list[int] = []
        if n_top > 0:
            candidates = np.argpartition(-row, n_top - 1)[:n_top]
            top = candidates[np.argsort(-row[candidates], kind="stable")].tolist()
        self.entries.append((float(row[token]) - log_sum, [(i, float(row[i]) - log_sum) for i in top]))


def completion_logprobs(
    detokenize: Callable[..., bytes],
    tokens: list[int],
    entries: list[tuple[float, list[tuple[int, float]]] | None],
    text_offset: int,
    skip: int,
) -> dict[str, Any]:
    """The `logprobs` field of a completion, laid out as in llama-cpp-python.

    Args:
        detokenize: As `Llama.detokenize`.
        tokens: All tokens of the text, prompt included if it is echoed.
        entries: For each token what was collected, None where there is nothing before it.
        text_offset: Characters before the first token.
        skip: A token id that is left out (BOS).
    """

    def text(ids: list[int], before: list[int]) -> str:
        return detokenize(ids, prev_tokens=before).decode("utf-8", errors="ignore")

    out: dict[str, list[Any]] = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
    for i, (token, entry) in enumerate(zip(tokens, entries)):
        if token == skip:
            continue
        before = tokens[:i]
        piece = text([token], before)
        out["tokens"].append(piece)
        out["text_offset"].append(text_offset + len(detokenize(before).decode("utf-8", errors="ignore")))
        if entry is None:
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
            continue
        own, top = entry
        out["token_logprobs"].append(own)
        out["top_logprobs"].append({**{text([t], before): logprob for t, logprob in top}, piece: own})
    return out


class RowStore:
    """Rows of the running generation by position, in place of the base class's array of all logits.

    Indexed like that array, `store[position, :]`, where position is that of the token the row follows; -1: the newest.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}

    def add(self, position: int, row: Row) -> None:
        """Keeps a row until a later one is read."""
        self._rows[position] = row

    def replace(self, position: int, row: Row) -> None:
        """Keeps this row alone."""
        self._rows = {position: row}

    def clear(self) -> None:
        """Forgets all rows."""
        self._rows = {}

    def __getitem__(self, key: tuple[int, slice]) -> Row:
        position, columns = key
        if position == -1 and self._rows:
            return self._rows[max(self._rows)][columns]  # a stopping criterion looks at it before older rows are read
        try:
            row = self._rows[position]
        except KeyError:
            raise IndexError(
                f"the logits of position {position} were not kept; ask for logprobs, or load with logits_all=True."
            ) from None
        # Readers go forwards; what lies behind is not asked for again.
        self._rows = {p: r for p, r in self._rows.items() if p >= position}
        return row[columns]
