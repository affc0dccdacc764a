"""The prompt of /infill: the text before a gap, the text after it, and pieces of other files, cut as llama.cpp's server
cuts them: an editor sends what it has, and asks again at every key.

Of 2,048 tokens, or as many as there is room for, the end of the prefix gets three quarters, and the beginning of the
suffix one, less the text that the answer continues. The end of the other pieces gets what the context has left, less
twice the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyfly_cpp.serve.requests import InfillRequest, _Extra
from pyfly_cpp.serve.served_model import Model

_NEAR = 2048
_MOST_CHARACTERS = 16
"""Characters that are read for each token that there is room for."""
_PROJECT, _FILE = "project\n", "file\n"
"""The names that are written for the project, and for the file with the gap."""


def infill_prompt(model: Model, body: InfillRequest, n_answer: int | None) -> list[int]:
    """The tokens of the prompt.

    Args:
        body: Of the request.
        n_answer: Most tokens of the answer; None: as many as there is room for.

    Raises:
        ApiError: the model cannot fill in.
    """
    n_ctx = model.batch.n_ctx
    room = max(2, n_ctx // 4 if n_answer is None else min(n_answer, n_ctx // 4))
    near = max(0, min(_NEAR, n_ctx - room - 2))  # without a token to begin with, and the last one
    begun = model.plain_tokens(body.prompt or "")
    n_prefix, n_suffix = 3 * (near // 4), max(0, near // 4 - 2 - len(begun))
    before = _end(model, body.input_prefix, n_prefix)
    behind = model.plain_tokens(body.input_suffix[: _MOST_CHARACTERS * n_suffix])[:n_suffix]
    others = _others(model, body.input_extra or [], max(0, n_ctx - near - 2 * room))
    return model.infill([*before, *begun], behind, others)


def _end(model: Model, text: str, n: int) -> list[int]:
    return model.plain_tokens(text[-_MOST_CHARACTERS * n :])[-n:] if n > 0 else []


def _others(model: Model, pieces: Sequence[_Extra], n: int) -> list[int]:
    """The last n tokens of the pieces of other files, as models with tokens for that were trained on them."""
    if not pieces or n <= 0:
        return []
    repository, file = model.vocabulary.project_tokens()
    mark = [file] if file >= 0 else []
    out = [*mark, *model.plain_tokens(_FILE)] if mark else []
    for piece in reversed(pieces):
        if len(out) >= n:
            break
        name, text = piece.filename or "", f"{piece.text}\n"
        out = [*mark, *model.plain_tokens(f"{name}\n"), *_end(model, text, n), *out]
    begun = [repository, *model.plain_tokens(_PROJECT)] if repository >= 0 else []
    return [*begun, *out][-n:]
