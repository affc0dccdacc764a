"""The demands of a body on each of its answers, whatever its route: an `AnswerRequest`, made of the fields that all
routes share."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyfly_cpp.decoding import EXACT, Decoding
from pyfly_cpp.decoding.gates import parse_gate
from pyfly_cpp.decoding.windows import parse_window
from pyfly_cpp.serve.api_errors import bad_request
from pyfly_cpp.serve.grammars import Constraint
from pyfly_cpp.serve.requests import RequestBody, SharedFields

ANY_SEED = 2**32 - 1
"""llama.cpp's word for a seed that is drawn."""

SAMPLING = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "typical_p": "typical_p",
    "repeat_penalty": "repeat_penalty", "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty", "mirostat_mode": "mirostat_mode", "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}  # fmt: skip
"""Fields of a request, and the arguments of `generate` that they are."""

_INTEGERS = ("top_k", "mirostat_mode")
_PENALTIES = {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


@dataclass(frozen=True)
class AnswerRequest:
    """One answer that is wanted: the request that the engine will run, before it has its turn."""

    prompt: tuple[int, ...]
    max_tokens: int
    """0: the prompt is read, and nothing is written."""
    sampling: Mapping[str, Any]
    """Arguments of `generate`."""
    seed: int
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Constraint | None = None
    n_logprobs: int | None = None
    """Most probable tokens that are wanted at each place; None: no log-probabilities."""
    echo: bool = False
    """Whether the log-probabilities of the prompt are also wanted."""
    records: bool = False
    """Whether it is to be told how each token came."""
    decoding: Decoding = EXACT
    owner: int = 0
    """Whose it is: the number of the API key."""
    new_processor: Callable[[], Callable[[Any, Any], Any]] | None = None
    """Makes what shapes the logits of this text alone."""
    shown: frozenset[int] = frozenset()
    """Control tokens whose texts belong to the text."""
    line_seconds: float | None = None
    """Seconds after the first token, from which on the end of a line ends the text; None: no limit."""
    stops_loops: bool = False
    """Whether an answer that repeats itself is ended."""

    @property
    def shapes_rows(self) -> bool:
        """Whether it may take the last choice from the sampler."""
        penalties = (self.sampling.get(name, neutral) != neutral for name, neutral in _PENALTIES.items())
        return self.grammar is not None or bool(self.logit_bias or self.new_processor) or any(penalties)


def read_decoding(body: RequestBody, header: str | None, own: Decoding) -> Decoding:
    """How a request decodes: by its fields, and without them by the header `X-Pyfly: gate=...;
    draft-max=...`, and else as the server does. Raises ApiError."""
    given = {**_read_header(header), **_set(body, _DECODING)}
    try:
        gate = None if "gate" not in given else parse_gate(given["gate"])
        window = None if "window" not in given else parse_window(given["window"])
        draft_max = given.get("draft_max")
        k = 0 if given.get("speculative") is False else None if draft_max is None else int(draft_max)
        return own.but(gate=gate, window=window, draft_max=k)
    except ValueError as error:
        raise bad_request(str(error), "gate" if "gate" in given else "window") from None


_DECODING = ("gate", "window", "draft_max", "speculative")


def _set(body: RequestBody, names: Iterable[str]) -> dict[str, Any]:
    """The fields of these names that a body sets."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def _read_header(text: str | None) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for part in (text or "").split(";"):
        name, separator, value = part.strip().partition("=")
        name, value = name.strip().replace("-", "_"), value.strip()
        if not part.strip():
            continue
        if name not in _DECODING or not separator or len(value) > 256:
            raise bad_request("the header X-Pyfly is written gate=...; window=...; draft-max=N; speculative=false.")
        if name == "draft_max":
            if not (value.isascii() and value.isdigit()) or len(value) > 9:
                raise bad_request(f"draft-max of the header X-Pyfly must be a whole number, not {value!r}.")
            out[name] = int(value)
        elif name == "speculative":
            if value not in ("true", "false"):
                raise bad_request(f"speculative of the header X-Pyfly must be true or false, not {value!r}.")
            out[name] = value == "true"
        else:
            out[name] = value
    return out


def written(decoding: Decoding) -> str:
    """What decides about a text, as it is written: not how much is drafted, nor by what."""
    return str(decoding if decoding.is_plain else Decoding(decoding.gate, decoding.window))


def read_sampling(body: SharedFields, defaults: Mapping[str, float]) -> dict[str, Any]:
    """Arguments of `generate`."""
    given = {**defaults, **_set(body, SAMPLING)}
    if body.mirostat is not None and body.mirostat_mode is None:  # llama.cpp's name for it
        given["mirostat_mode"] = body.mirostat
    out: dict[str, Any] = {}
    for name, value in given.items():
        out[SAMPLING[name]] = int(value) if name in _INTEGERS else float(value)
    return out


def settings_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate`, by the names that requests have for them."""
    return {name: sampling[argument] for name, argument in SAMPLING.items() if argument in sampling}


def read_seeds(seed: int | None, n: int, own: int | None) -> list[int]:
    """A seed for each of n requests: of the first the given one, then the next. None, -1 and ANY_SEED mean the server's
    own, or any if it has none."""
    given = own if seed in (None, -1, ANY_SEED) else seed
    first = secrets.randbelow(ANY_SEED) if given is None or given == -1 else int(given)
    return [(first + i) % ANY_SEED for i in range(n)]


def read_stop(stop: str | list[str] | None, own: list[str]) -> tuple[str, ...]:
    """Texts that end an answer: the request's and the chat format's."""
    texts = [stop] if isinstance(stop, str) and stop else stop or ()
    return tuple(dict.fromkeys((*texts, *own)))


def read_logit_bias(
    body: SharedFields, n_vocab: int, tokens_of: Callable[[str], Sequence[int]], forbidden: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    """Numbers added to the logits of tokens.

    Args:
        tokens_of: The tokens of a text: a bias may be that of all of them.
        forbidden: Tokens that are not to be chosen, whatever the request asks of them.

    Raises:
        ApiError: one is no token.
    """
    given: Any = body.logit_bias or {}
    out: dict[int, float] = {}
    for key, bias in given.items() if isinstance(given, dict) else given:
        if isinstance(bias, str) or isinstance(key, (bool, float)) or abs(bias) > 100:
            raise bad_request("logit_bias has an entry that is not [token, bias], bias from -100 to 100.", "logit_bias")
        is_id = isinstance(key, int) or (key.isascii() and key.isdigit())
        if is_id and (len(str(key)) > 9 or not 0 <= int(key) < n_vocab):
            raise bad_request(f"logit_bias has the token {str(key)[:40]}; tokens are under {n_vocab}.", "logit_bias")
        tokens = [int(key)] if is_id else tokens_of(key)
        out.update(dict.fromkeys(tokens, -math.inf if bias is False else float(bias)))
    return tuple({**out, **dict.fromkeys(forbidden, -math.inf)}.items())
