"""The plan of a training: its work, its needs, and whether it is possible; made before any work."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyfly_cpp import _native
from pyfly_cpp.errors import IncompatibleDraftError
from pyfly_cpp.heads.built_in_prompts import built_in
from pyfly_cpp.machine.files import require_free, require_gguf, require_other, require_space
from pyfly_cpp.machine.memory import bytes_of_model
from pyfly_cpp.machine.prompt_sets import read_prompts
from pyfly_cpp.machine.rows import DataError

KINDS = ("q8_0", "q4_0", "f16")
"""Types of a head's matrices."""

LEAST_TOKENS = 2000
"""Least tokens to learn from; fewer teach nothing."""


@dataclass(frozen=True)
class TrainingPlan:
    """A training."""

    target: Path
    output: Path
    texts: Path | None
    """The user's files; None: the target writes the texts itself."""
    prompts: Mapping[str, Sequence[str]]
    """Prompts that the target answers, by kind."""
    asks: bool
    """Whether the target also makes up prompts itself."""
    n_tokens: int
    """Most tokens of the texts."""
    hours: float
    """Most time for all steps."""
    kind: str
    """Type of the head's matrices."""
    licence: str | None
    """Licence of the texts, for the metadata."""
    layers: tuple[int, int, int]
    """Layers of the target whose inputs the head reads."""
    n_bytes_disk: int
    """Approximate bytes of texts, states and checkpoint in `folder`."""
    n_bytes_memory: int
    """Approximate bytes of memory for target, head and optimiser."""

    @property
    def folder(self) -> Path:
        """The folder of files that are kept until the head is done, so that the same command resumes."""
        return self.output.with_name(self.output.name + ".work")

    @property
    def origin(self) -> Path:
        """The file in `folder` that tells what a training was made from; there from its beginning on."""
        return self.folder / "made_from.json"


def plan_head(
    target: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    texts: str | os.PathLike[str] | None = None,
    prompts: str | os.PathLike[str] | None = None,
    n_tokens: int = 200_000,
    hours: float = 3.0,
    kind: str = "q8_0",
    licence: str | None = None,
    force: bool = False,
) -> TrainingPlan:
    """Looks at the files, not at their weights.

    Args:
        target: The model to draft for, one GGUF file.
        output: The head to write.
        texts: A folder with UTF-8 files, or one file, to learn from; None: what the target answers to prompts.
        prompts: JSON Lines with `prompt` and, if there are several kinds, `category`; None: built-in ones, and some
            that the target makes up itself. Not with `texts`.
        n_tokens: Tokens to learn from, at most.
        hours: Most time, for all.
        kind: Type of the head's matrices: "q8_0", "q4_0" or "f16".
        licence: What the file will name as the licence of its texts.
        force: Overwrite the output.

    Raises:
        ValueError: the target or a file cannot be used, the output is the target, an argument is out of range, or
            PyTorch or gguf is missing.
        IncompatibleDraftError: no head can read this target's layers.
        OutputError: the output exists and is not an interrupted training's, or its folder cannot be written to or is
            too full.
    """
    if missing := [name for name in ("torch", "gguf") if importlib.util.find_spec(name) is None]:
        raise ValueError(f"training a head needs {' and '.join(missing)}; run `pip install 'pyfly-cpp[train]'`.")
    if not n_tokens >= LEAST_TOKENS or not hours > 0:
        raise ValueError(f"a head needs at least {LEAST_TOKENS} tokens and some time; raise --tokens or --hours.")
    if kind not in KINDS:
        raise ValueError(f"the type {kind!r} is unknown; the types are {', '.join(KINDS)}.")
    if texts is not None and prompts is not None:
        raise ValueError("--texts and --prompts exclude each other; give one of them.")
    path, out = Path(target), Path(output)
    require_gguf(str(path))
    info = _native.inspect_model(str(path))
    if info.layer_inputs == 0 or info.n_layer < 4:
        raise IncompatibleDraftError(
            f"heads cannot read the layers of {path.name} (architecture {info.architecture}, {info.n_layer} layers); "
            "use another drafter."
        )
    if texts is not None and not os.path.exists(texts):
        raise DataError(f"{os.fspath(texts)} does not exist; give a folder with texts, or one file.")
    from pyfly_cpp.heads.target import TargetFile

    n_embd = TargetFile(path).n_embd
    n_bytes = n_tokens * (8 * n_embd + 120) + 60 * n_embd * n_embd * 12
    plan = TrainingPlan(
        path, out, None if texts is None else Path(texts), _prompts(prompts), texts is None and prompts is None,
        n_tokens, hours, kind, licence, layers_of(info.n_layer), n_bytes,
        bytes_of_model(path) + 60 * n_embd * n_embd * 16 + 2 * 10**9,
    )  # fmt: skip
    require_other(out, path)
    require_free(out, force or plan.origin.exists())
    n_there = sum(file.stat().st_size for file in plan.folder.glob("*"))  # of an interrupted training
    require_space(out.absolute().parent, max(n_bytes - n_there, 0), "make room, or write to another disk with --output")
    return plan


def layers_of(n_layer: int) -> tuple[int, int, int]:
    """The layers whose inputs a head reads: a low, a middle and the last one of n_layer >= 4 layers."""
    return max(1, min(2, n_layer // 6)), n_layer // 2, n_layer - 1


def _prompts(path: str | os.PathLike[str] | None) -> Mapping[str, Sequence[str]]:
    if path is None:
        return {kind: tuple(of) for kind, of in built_in().items()}
    by_kind: dict[str, list[str]] = {}
    for prompt in read_prompts(path):
        by_kind.setdefault(prompt.category or "prompt", []).append(prompt.turns[0])
    return by_kind
