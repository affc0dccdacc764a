"""What `eval`, `bench` and `tune` share on the command line: which models to load, and how errors are told."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import click

from pyfly_cpp.drafters import DraftModel, PromptLookup
from pyfly_cpp.errors import PyflyError
from pyfly_cpp.evaluation.generation import Generator
from pyfly_cpp.evaluation.machine import describe_machine, describe_model
from pyfly_cpp.evaluation.settings import Setting
from pyfly_cpp.llama import FlyLlama
from pyfly_cpp.presets import Preset, load_preset

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Models:
    """What to load."""

    model: str
    draft: str | None
    n_ctx: int
    threads: int | None
    gpu_layers: int
    chat_format: str | None
    preset: Preset | None = None

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The preset's setting, if there is a preset."""
        if self.preset is None:
            return ()
        drafter = self.preset.drafter
        kind = "none" if drafter is None else "draft" if isinstance(drafter, DraftModel) else "lookup"
        return (Setting(self.preset.gate, self.preset.window, self.preset.draft_max, kind),)

    def load(self) -> Generator:
        """Loads the target; the draft is loaded when a setting first asks for it, and checked here."""
        draft = DraftModel(self.draft) if self.draft else None
        lookup: PromptLookup | None = None
        if self.preset is not None and isinstance(self.preset.drafter, DraftModel) and self.draft:
            draft = dataclasses.replace(self.preset.drafter, model_path=self.draft)
        elif self.preset is not None and isinstance(self.preset.drafter, PromptLookup):
            lookup = self.preset.drafter
        llm = FlyLlama(
            self.model, drafter=draft, n_ctx=self.n_ctx, n_threads=self.threads, n_threads_batch=self.threads,
            n_gpu_layers=self.gpu_layers, chat_format=self.chat_format, verbose=False,
        )  # fmt: skip
        return Generator(llm, draft, lookup)

    def describe(self, llm: FlyLlama) -> dict[str, Any]:
        """Files with hashes, and what decoding depends on."""
        return {
            "model": describe_model(self.model),
            "draft": describe_model(self.draft) if self.draft else None,
            "n_ctx": llm.n_ctx(),
            "n_threads": llm.n_threads,
            "gpu_layers": self.gpu_layers,
            "chat_format": llm.chat_format,
        }


def model_options(command: Command) -> Command:
    """Adds the options that say which models to load; the command gets them as one argument `models: Models`."""
    options = [
        click.option(
            "--model", "-m", "model", metavar="FILE", help="GGUF file of the target.  [default: the preset's]"
        ),
        click.option(
            "--draft", "-d", metavar="FILE", help="GGUF file of the draft model; without one, prompt lookup drafts."
        ),
        click.option(
            "--preset", metavar="FILE", help="Preset of `tune`: its models where none are given, and its setting too."
        ),
        click.option(
            "--ctx", "n_ctx", type=click.IntRange(64), default=4096, show_default=True, help="Context, tokens."
        ),
        click.option("--threads", "-t", type=click.IntRange(1), help="Threads.  [default: the physical cores]"),
        click.option(
            "--gpu-layers", type=click.IntRange(-1), default=0, show_default=True, help="Layers on the GPU, -1: all."
        ),
        click.option(
            "--chat-format", metavar="NAME", help="llama-cpp-python's name of a chat format.  [default: the model's]"
        ),
    ]

    @functools.wraps(command)
    def with_models(
        model: str | None,
        draft: str | None,
        preset: str | None,
        n_ctx: int,
        threads: int | None,
        gpu_layers: int,
        chat_format: str | None,
        **rest: Any,
    ) -> Any:
        with one_sentence_errors():
            loaded = load_preset(preset) if preset is not None else None
        if loaded is not None:
            model = model or loaded.model
            if isinstance(loaded.drafter, DraftModel):
                draft = draft or str(loaded.drafter.model_path)
        if model is None:
            raise click.UsageError("Missing option '--model' / '-m' (or a --preset that names a model).")
        return command(models=Models(model, draft, n_ctx, threads, gpu_layers, chat_format, loaded), **rest)

    wrapped: Any = with_models
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]


def warn_of_load(machine: dict[str, Any]) -> None:
    """Says on stderr if other programs were busy: then no speed is to be believed."""
    load = machine["load_before"]
    if load is not None and load > 0.5 * machine["physical_cores"]:
        click.echo(
            f"warning: the load of this machine was {load} on {machine['physical_cores']} cores before the run; close "
            "other programs, or do not believe the speeds.",
            err=True,
        )


@contextlib.contextmanager
def one_sentence_errors(interrupted: str = "") -> Iterator[None]:
    """Tells errors that we know as `Error: ...` (status 1), Ctrl-C as `interrupted` (status 130), no traceback."""
    try:
        yield
    except (ValueError, PyflyError, MemoryError) as error:
        raise click.ClickException(str(error) or type(error).__name__) from error
    except KeyboardInterrupt:
        click.echo(f"\nInterrupted. {interrupted}".rstrip(), err=True)
        sys.exit(130)


def machine_lines(machine: dict[str, Any], models: dict[str, Any]) -> list[str]:
    """The conditions of a measurement, for people."""
    draft = f", draft {models['draft']['file']} (sha256 {models['draft']['sha256'][:12]})" if models["draft"] else ""
    return [
        f"model {models['model']['file']} (sha256 {models['model']['sha256'][:12]}){draft}; context {models['n_ctx']}, "
        f"{models['n_threads']} threads, {models['gpu_layers']} layers on the GPU",
        f"{machine['cpu']}, {machine['physical_cores']} physical cores, {machine['system']}; load before the run "
        f"{machine['load_before']}",
        f"pyfly-cpp {machine['pyfly_cpp']} ({machine['simd']}), llama-cpp-python {machine['llama_cpp_python']}, Python "
        f"{machine['python']}; started {machine['started']}",
    ]


class Advance(Protocol):
    """Moves a progress bar."""

    def __call__(self, done: int, description: str, n_total: int | None = None) -> None:
        """`done` of the total; a new total begins a new bar."""


@contextlib.contextmanager
def progress_bar(n_total: int, what: str) -> Iterator[Advance]:
    """A bar with the time left, on stderr; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        handle = bar.add_task(what, total=n_total)
        total = n_total
        begun = -1  # what an earlier, interrupted run has done must not look like speed

        def advance(done: int, description: str, n_total: int | None = None) -> None:
            nonlocal begun, total
            if begun < 0 or (n_total is not None and n_total != total):
                total = total if n_total is None else n_total
                begun = done - 1
                bar.reset(handle, total=total - begun)
            bar.update(handle, completed=done - begun, description=description)

        yield advance


def terminal_width() -> int:
    """Columns of stdout; 220 where it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 220


def show_table(title: str, head: list[str], body: list[list[str]]) -> None:
    """Prints a table to stdout, wrapped to the terminal; piped, as wide as it is."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=terminal_width())
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in body:
        table.add_row(*row)
    console.print(table)


__all__ = [
    "Models",
    "describe_machine",
    "machine_lines",
    "model_options",
    "one_sentence_errors",
    "progress_bar",
    "show_table",
    "terminal_width",
    "warn_of_load",
]
