"""`pyfly-cpp models draft`: a draft of a model, quantised from it."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import NamedTuple

import click
import llama_cpp

from pyfly_cpp import _native
from pyfly_cpp.cli.kinds import FILE, MODEL
from pyfly_cpp.cli.loading import llama_reasons, silence
from pyfly_cpp.cli.terminal import Bar
from pyfly_cpp.machine.files import replaced, require_free, require_gguf, require_other, require_space
from pyfly_cpp.machine.memory import in_words
from pyfly_cpp.machine.programs import quantize
from pyfly_cpp.models.metadata import open_metadata
from pyfly_cpp.models.named import models_folder, resolve_model
from pyfly_cpp.models.ollama import shown_name


class _Type(NamedTuple):
    ftype: int
    """`llama_ftype` of llama.h."""
    bits: float
    """Bits of a weight, a little too many: some matrices are kept in larger types."""


DEFAULT_TYPE = "Q4_K_M"

_TYPES = {
    "Q2_K": _Type(llama_cpp.LLAMA_FTYPE_MOSTLY_Q2_K, 3.6),
    "Q3_K_S": _Type(llama_cpp.LLAMA_FTYPE_MOSTLY_Q3_K_S, 3.9),
    "Q4_0": _Type(llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, 4.9),
    "Q4_K_M": _Type(llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, 5.3),
}


@click.command("draft", epilog="Example: pyfly-cpp models draft target.gguf --type Q4_K_M")
@click.argument("target", type=MODEL)
@click.option("--type", "name", default=DEFAULT_TYPE, show_default=True, metavar="TYPE",
              type=click.Choice(tuple(_TYPES), case_sensitive=False), help=f"{', '.join(_TYPES)}.")  # fmt: skip
@click.option("-o", "--output", type=FILE, help="The draft to write.  [default: next to TARGET, by its type; for a "
              "model of the hub or of Ollama in the models folder]")  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def command(target: str, name: str, output: str | None, force: bool) -> None:
    """Quantise TARGET to a draft for itself.

    A draft like this helped for an F16 file, and hardly for a quantised one: measure it with the command that is
    printed at the end.
    """
    model = resolve_model(target)
    draft = Path(output) if output else _default_output(model, name)
    n_bytes = _size(model, name)
    require_other(draft, model)
    require_free(draft, force)
    if not output:
        draft.parent.mkdir(parents=True, exist_ok=True)
    require_space(draft.absolute().parent, n_bytes, "make room, or write to another disk with --output")
    with Bar() as bar, replaced(draft) as unfinished:

        def poll() -> None:
            with contextlib.suppress(OSError):
                done = min(1.0, unfinished.stat().st_size / n_bytes)
                bar.update(f"quantising {model.name}", done, 1.0, f"{done:.0%}")

        failure = f"llama.cpp could not quantise {model.name!r} to {name}"
        quantize(model, unfinished, _TYPES[name].ftype, poll, failure)
    click.echo(f"{draft} ({in_words(draft.stat().st_size)}) is written. Compare it with no drafts:")
    click.echo(f"  pyfly-cpp bench -m {shlex.quote(str(model))} -d {shlex.quote(str(draft))}")


def _default_output(model: Path, name: str) -> Path:
    """Next to the model, but not among the files of the hub's cache or of Ollama: a name of the hub means whatever lies
    there."""
    stem = shown_name(model).removesuffix(".gguf").replace(":", "-").replace("/", "-")
    folder = models_folder() if {"snapshots", "blobs"} & {*model.absolute().parts} else model.parent
    return folder / f"{stem}.draft-{name}.gguf"


def can_draft_for_itself(model: Path) -> bool:
    """Whether the command makes a draft of DEFAULT_TYPE from this model."""
    try:
        _size(model, DEFAULT_TYPE)
    except ValueError:
        return False
    return True


def _size(model: Path, name: str) -> int:
    """Most bytes of the draft, about. Raises ValueError: it would not be smaller than the model, or that is none."""
    require_gguf(str(model))
    silence()
    with llama_reasons():
        _native.inspect_model(str(model))
    with llama_reasons(), open_metadata(model) as opened:
        n_bytes = int(llama_cpp.llama_model_n_params(opened) * _TYPES[name].bits / 8)
        if n_bytes >= 0.9 * llama_cpp.llama_model_size(opened):
            raise ValueError(
                f"{model.name} is hardly larger than its {name} draft would be, which would be as slow; use a smaller "
                "model of its family, or prompt lookup."
            )
    return n_bytes
