"""A logistic gate whose weights `pyfly-cpp tune --judge` has learned from prompts of the user's own."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyfly_cpp import _native
from pyfly_cpp.decoding.gates.at_once import AtOnce
from pyfly_cpp.decoding.gates.gate import GateNode
from pyfly_cpp.errors import did_you_mean
from pyfly_cpp.machine.files import is_stream

FORMAT = 1

FEATURES = tuple(_native.FEATURES)
"""What a `Judge` may weigh, in the order of `pyfly_feature` of pyfly.h, which describes each."""

OF_DRAFT = ("draft", "draft_rank", "kl")
"""Those of the draft's distribution."""


@dataclass(frozen=True)
class Judge(AtOnce):
    """Defers if a logistic regression finds it probable that the draft token leaves the answer as good as it was:
    1 / (1 + exp(-(bias + sum of weight x feature))) >= threshold.

    Source: AutoJudge (arXiv 2504.20039), whose classifier reads hidden states; this one reads `FEATURES`. With a weight
    for one of the draft's distribution it needs a drafter that has one: a draft model or a head.
    """

    file: str | os.PathLike[str] = field(compare=False)
    """Where the rest is read from, unless it is given: JSON, written by `pyfly-cpp tune --judge`."""

    weights: tuple[tuple[str, float], ...] | None = None
    """(feature, weight) of each feature that counts."""

    bias: float = 0.0

    threshold: float = 0.5
    """Least probability, between 0 and 1, both excluded."""

    def __post_init__(self) -> None:
        file = os.fspath(self.file)
        if any(c in file for c in ",()"):
            raise ValueError(f"the name of the judge {file} has a comma or parentheses; rename the file.")
        said = _read(file) if self.weights is None else (dict(self.weights), self.bias, self.threshold)
        weights, bias, threshold = said
        for name in weights:
            if name not in FEATURES:
                hint = did_you_mean(name, FEATURES)
                raise ValueError(f"the judge {file} weighs {name!r}.{hint} The features are {', '.join(FEATURES)}.")
        for name, value in {**weights, "bias": bias, "threshold": threshold}.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:
                raise ValueError(f"the judge {file} has the {name} {value!r}; it must be a finite number.")
        if not 0 < threshold < 1:
            raise ValueError(f"the judge {file} has the threshold {threshold!r}; it must be between 0 and 1.")
        object.__setattr__(self, "file", file)
        object.__setattr__(self, "weights", tuple((name, float(weight)) for name, weight in weights.items()))
        object.__setattr__(self, "bias", float(bias))
        object.__setattr__(self, "threshold", float(threshold))

    def nodes(self) -> tuple[GateNode, ...]:
        weights = [GateNode("weight", _native.FEATURES[name], weight) for name, weight in self.weights or ()]
        least = math.log(self.threshold / (1 - self.threshold))
        return (*weights, GateNode("learned", len(weights), least, self.bias))

    def __str__(self) -> str:
        return f"judge:{self.file}"


def judge_as_dict(judge: Judge, trained: dict[str, Any]) -> dict[str, Any]:
    """The content of its file; `trained`: what it was learned from, for people."""
    weights = dict(judge.weights or ())
    return {"format": FORMAT, "features": weights, "bias": judge.bias, "threshold": judge.threshold, "trained": trained}


def _read(file: str) -> tuple[dict[str, Any], Any, Any]:
    """Weights, bias and threshold of a file, whatever they are. Raises ValueError."""
    if is_stream(file):
        raise ValueError(f"the judge {file} is a device or a pipe; give the path of a JSON file.")
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"the judge {file} cannot be read ({error.strerror}); check the path, or write one with "
            "`pyfly-cpp tune --judge`."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the judge {file} is not JSON ({error}); write it anew.") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"the judge {file} has the format {found!r}, and this pyfly-cpp reads {FORMAT}.")
    if not isinstance(data.get("features"), dict):
        raise ValueError(f"the judge {file} needs 'features', an object of weights; write it anew.")
    return data["features"], data.get("bias"), data.get("threshold")
