"""What `eval`, `bench`, `tune` and `explain` share on the command line: which models to load, how errors are told."""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import click
import llama_cpp

from pyfly_cpp.bench.report import require_matplotlib
from pyfly_cpp.cli import describe
from pyfly_cpp.cli.kinds import THREAD_COUNT, Int, Renamed
from pyfly_cpp.cli.loading import model_path, reasons_from, require_chat_format, silence, warn_of_long_context
from pyfly_cpp.cli.options import DEFAULT_N_CTX, THREADS_HELP
from pyfly_cpp.cli.terminal import note, shown, write
from pyfly_cpp.cli.where import KERNELS_OPTION, WHERE_OPTIONS, Where
from pyfly_cpp.decoding import PLAIN, Decoding, written_drafters
from pyfly_cpp.decoding.data import drafter_as_data
from pyfly_cpp.decoding.drafters import DRAFTERS, require_drafters
from pyfly_cpp.decoding.drafting import AUTO, Drafters, choose_drafters
from pyfly_cpp.decoding.presets import SHIPPED, Preset, load_preset
from pyfly_cpp.errors import PyflyError
from pyfly_cpp.evaluation.drafting import files_of, load_batch, load_target
from pyfly_cpp.evaluation.generation import Generator
from pyfly_cpp.evaluation.machine import describe_machine, describe_model, disturbance
from pyfly_cpp.evaluation.parallel import ParallelGenerator, choose_parallel
from pyfly_cpp.machine.files import require_free
from pyfly_cpp.machine.threads import AUTO as AUTO_THREADS
from pyfly_cpp.models.named import resolve_model

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])
AnyGenerator = TypeVar("AnyGenerator", bound=Generator)


@dataclass(frozen=True)
class Models:
    """What to load."""

    model: str
    draft: str | None
    drafter: str
    """A drafter's word, or `auto`."""
    n_ctx: int
    threads: int | str
    """A number, or "auto"."""
    gpu_layers: int
    chat_format: str | None
    kernels: str | None
    preset: Preset | None = None
    where: Where = Where()  # noqa: RUF009 - frozen

    @property
    def settings(self) -> tuple[Decoding, ...]:
        """The preset's setting, if there is a preset; without the governor, as all that do not ask for it."""
        if self.preset is None:
            return ()
        said = self.preset.decoding
        if said.drafter == "none" and self.drafter == AUTO:
            return (PLAIN,)
        return (Decoding(said.gate, said.window, said.draft_max or None).canonical(),)

    def drafters(self) -> tuple[Drafters, str]:
        """What the drafter words stand for, and why the default is what it is."""
        preset = () if self.preset is None else self.preset.drafters
        drafters, reason = choose_drafters(self.model, self.draft, self.drafter, preset)
        given = tuple(self.where.place_own(drafter) for drafter in drafters.given)
        return Drafters(given, self.where.place(drafters.default)), reason

    def open(self, settings: Sequence[Decoding], draft_max: int = 0) -> Session[Generator]:
        """Loads the target and, to see that they fit, all that draft for `settings`; warns if the machine is busy.

        Args:
            draft_max: The largest K that later settings may have.
        """
        return self._open(
            settings, lambda drafters: Generator(self._load(load_target, drafters, settings, draft_max), drafters)
        )

    def open_parallel(self, settings: Sequence[Decoding], n_parallel: int) -> Session[ParallelGenerator]:
        """The same for so many texts at once, each of n_ctx tokens."""

        def load(drafters: Drafters) -> ParallelGenerator:
            try:
                batch = self._load(load_batch, drafters, settings, n_parallel)
            except ValueError as error:  # in the words of the command line
                words = str(error).replace("lower n_parallel, n_ctx or n_cells", "lower --parallel or --n-ctx")
                raise ValueError(words.replace("n_parallel", "--parallel")) from error
            return ParallelGenerator(batch, drafters)

        return self._open(settings, load)

    def choose_parallel(self) -> int:
        """How many texts at once fit well in memory."""
        silence()
        return choose_parallel(self.model, self.n_ctx)

    def _load(self, load: Callable[..., T], drafters: Drafters, settings: Sequence[Decoding], n: int) -> T:
        return load(
            self.model, drafters, settings, n, n_ctx=self.n_ctx, n_threads=self.threads,
            n_threads_batch=self.threads, n_gpu_layers=self.gpu_layers, chat_format=self.chat_format,
            kernels=self.kernels, verbose=False, **self.where.arguments(),
        )  # fmt: skip

    def _open(self, settings: Sequence[Decoding], load: Callable[[Drafters], AnyGenerator]) -> Session[AnyGenerator]:
        machine = describe_machine()  # before this program is the load
        warn_of_load(machine)
        drafters, reason = self.drafters()
        log = silence()
        warn_of_long_context(Path(self.model), self.n_ctx)
        with reasons_from(log):
            generator = load(drafters)
        llm = generator.llm
        require_chat_format(llm)
        generator.require(settings)
        default = drafters.of(Decoding())
        models: dict[str, Any] = {
            "model": describe_model(self.model),
            "drafter": [_without_folder(drafter_as_data(drafter)) for drafter in require_drafters(default)],
            "draft_files": [describe_model(path) for path in files_of(drafters, settings)],
            "n_ctx": generator.n_ctx,
            "n_threads": AUTO_THREADS if self.threads == AUTO_THREADS else llm.n_threads,
            "gpu_layers": self.gpu_layers,
            "chat_format": llm.chat_format,
            **self.where.as_dict(),
        }
        return Session(generator, machine, models, f"{' and '.join(map(str, require_drafters(default)))} ({reason})")


def _without_folder(drafter: dict[str, Any]) -> dict[str, Any]:
    field = DRAFTERS[drafter["kind"]].file_field
    path = drafter.get(field)
    return drafter if path is None else {**drafter, field: Path(path).name}


@dataclass(frozen=True)
class Session(Generic[AnyGenerator]):
    """What a measuring command works with."""

    generator: AnyGenerator
    machine: dict[str, Any]
    """Processor, load, versions."""
    models: dict[str, Any]
    """Files with hashes, the default drafter, and what else decoding depends on."""
    drafter: str
    """The default drafter, and why, for people."""

    def facts(self) -> list[str]:
        """The conditions of a measurement, for people."""
        machine, models = self.machine, self.models
        files = [models["model"], *models["draft_files"]]
        layers = "all" if models["gpu_layers"] < 0 else models["gpu_layers"]
        names = [f"{file['file']} (sha256 {file['sha256'][:12]})" for file in files]
        placed = {name: models[name] for name in ("rpc", "devices", "tensor_split", "draft_devices") if name in models}
        where = "".join(f", {name}: {','.join(map(str, value)) or 'none'}" for name, value in placed.items())
        return [
            f"model {names[0]}{''.join(f', drafting {name}' for name in names[1:])}; context {models['n_ctx']}, "
            f"threads: {models['n_threads']}, {layers} layers on the GPU{where}",
            f"drafter, where a setting names none: {self.drafter}",
            f"{machine['cpu']}, {machine['physical_cores']} physical cores, {machine['system']}; load before the run "
            f"{machine['load_before']}" + (f"; NOT IDLE: {why}" if (why := disturbance(machine)) else ""),
            f"pyfly-cpp {machine['pyfly_cpp']} ({machine['simd']}), llama-cpp-python {machine['llama_cpp_python']}, "
            f"Python {machine['python']}; started {machine['started']}",
        ]


def model_options(command: Command) -> Command:
    """Adds the options that say which models to load; the command gets them as one argument `models: Models`."""
    options = [
        click.option(
            "-m", "--model", metavar="MODEL",
            help="GGUF file, or a name of `pyfly-cpp models list`.  [default: the preset's, or the demo model]",
        ),
        click.option("-d", "--draft", metavar="FILE", help="Small model of the same vocabulary, or head."),
        click.option(
            "--drafter", metavar="WORD", default=AUTO, show_default=True,
            help=f"The drafter of settings that name none: {written_drafters()} (--draft may give its file, too); "
            "auto: the preset's, else the model's MTP head, else --draft, else a fitting file, else lookup.",
        ),
        click.option(
            "--preset", metavar="PRESET",
            help=f"A setting more: {', '.join(SHIPPED)}, or a file of `tune`, with its models and drafter where you "
            "give none.",
        ),
        click.option(
            "-c", "--n-ctx", "--ctx", "n_ctx", cls=Renamed, metavar="N", type=Int(min=64), default=DEFAULT_N_CTX,
            show_default=True, help="Context in tokens.",
        ),
        click.option(
            "-t", "--n-threads", "--threads", "threads", cls=Renamed, metavar="N", type=THREAD_COUNT,
            default=AUTO_THREADS, show_default=True, help=THREADS_HELP,
        ),
        KERNELS_OPTION,
        click.option(
            "--n-gpu-layers", "--gpu-layers", "gpu_layers", cls=Renamed, metavar="N", type=Int(min=-1), default=-1,
            help="Layers on the GPU.  [default: all, if llama-cpp-python was built for one]",
        ),
        *WHERE_OPTIONS,
        click.option(
            "--chat-format", metavar="NAME", help="Chat format.  [default: the model's own template]"
        ),
    ]  # fmt: skip

    @functools.wraps(command)
    def with_models(
        model: str | None,
        draft: str | None,
        drafter: str,
        preset: str | None,
        n_ctx: int,
        threads: int | str,
        gpu_layers: int,
        chat_format: str | None,
        kernels: str | None,
        **rest: Any,
    ) -> Any:
        with one_sentence_errors():
            loaded = load_preset(preset) if preset is not None else None
            if loaded is not None:
                model = model or loaded.model
            path = model_path(model)
            if model is None:
                note(f"no --model was given: this is the demo model, {path.name}")
            model = str(path)
            draft = None if draft is None else str(resolve_model(draft))
        where = Where.take(rest)
        gpu_layers = gpu_layers if llama_cpp.llama_supports_gpu_offload() or where.arguments() else 0
        models = Models(model, draft, drafter, n_ctx, threads, gpu_layers, chat_format, kernels, loaded, where)
        return command(models=models, **rest)

    wrapped: Any = with_models
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]


def require_outputs(files: Sequence[str | None], force: bool, plot: str | None = None) -> None:
    """Before any work: that these files can be written, and that `plot`, if it is wanted, can be drawn."""
    for file in (*files, plot):
        if file:
            require_free(file, force)
    if plot:
        require_matplotlib()


def warn_of_load(machine: dict[str, Any]) -> None:
    """Says on stderr if other programs were busy: then no speed is to be believed."""
    why = disturbance(machine)
    if why is not None:
        click.echo(f"warning: {why} The speeds cannot be trusted.", err=True)


@contextlib.contextmanager
def one_sentence_errors(interrupted: str = "") -> Iterator[None]:
    """Tells errors that we know as `Error: ...` (status 1), Ctrl-C as `interrupted` (status 130), no traceback."""
    try:
        yield
    except (ValueError, PyflyError, MemoryError) as error:
        raise click.ClickException(describe(error)) from error
    except KeyboardInterrupt:
        click.echo(f"\nInterrupted. {interrupted}".rstrip(), err=True)
        sys.exit(130)


def terminal_width() -> int:
    """Columns of stdout; 220 where it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 220


def _is_too_wide(head: list[str], body: list[list[str]], width: int) -> bool:
    """Whether a table of these cells would have to break words."""
    longest = [max(len(word) for cell in column for word in cell.split(" ")) for column in zip(head, *body)]
    return sum(longest) + 3 * len(longest) + 1 > width


def _show_list(title: str, head: list[str], body: list[list[str]]) -> None:
    """Prints what a table holds below one another, for narrow terminals."""
    write(f"{title}\n" if title else "")
    for first, *rest in body:
        write(f"{first or '-'}\n")
        for name, cell in zip(head[1:], rest):
            write(f"  {name}: {cell}\n")


def show_table(title: str, head: list[str], body: list[list[str]]) -> None:
    """Prints a table to stdout, wrapped to the terminal; piped, as wide as it is."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=terminal_width())
    if _is_too_wide(head, body, console.width):
        _show_list(title, head, body)
        return
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in body:
        table.add_row(*(Text(shown(cell, sys.stdout)) for cell in row))
    console.print(table)
