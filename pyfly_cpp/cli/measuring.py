"""Common parts of `eval`, `bench` and `explain` on the command line: a loaded model, its conditions, and tables."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp

from pyfly_cpp.cli import if_interrupted
from pyfly_cpp.cli.loading import Models
from pyfly_cpp.cli.terminal import shown, warn, write, write_marked
from pyfly_cpp.decoding import EXACT, PLAIN, Decoding, parse_settings
from pyfly_cpp.decoding.data import drafter_as_data
from pyfly_cpp.decoding.drafters import DRAFTERS
from pyfly_cpp.machine.conditions import CONDITIONS, describe_machine, describe_model, disturbance
from pyfly_cpp.machine.files import require_free, require_other, sha256
from pyfly_cpp.measure.journal import place
from pyfly_cpp.measure.loaded import files_of, load_generator, texts_of
from pyfly_cpp.measure.plot import require_matplotlib


def _without_folder(drafter: dict[str, Any]) -> dict[str, Any]:
    field = DRAFTERS[drafter["kind"]].file_field
    path = drafter.get(field)
    return drafter if path is None else {**drafter, field: Path(path).name}


@dataclass(frozen=True)
class Session:
    """The tools of a measuring command."""

    generator: Any
    """A `Generator`, or a `ParallelGenerator` if there are several requests at a time."""
    machine: dict[str, Any]
    """Processor, load, versions."""
    models: dict[str, Any]
    """Files with hashes, the default drafter, and what else decoding depends on: `_ALWAYS`, and what was given."""
    drafter: str
    """The default drafter, and why, for people."""

    def conditions(self) -> dict[str, Any]:
        """Conditions that must be equal for measurements to stand in one table."""
        ours = self.generator.llm.kernels_used
        return {
            **{name: self.machine[name] for name in CONDITIONS},
            **self.models,  # --kernels goes before the environment
            "kernels_used": [*ours.types, ours.attention],
        }

    def facts(self, starts: Sequence[dict[str, Any]] = ()) -> list[str]:
        """The conditions of a measurement, for people; `starts`: the machine at each start of a resumed one."""
        machine, *resumed = starts or [self.machine]
        why = next((why for one in (machine, *resumed) if (why := disturbance(one))), None)
        models = self.models
        files = [models["model"], *models["draft_files"]]
        layers = "all" if models["gpu_layers"] < 0 else models["gpu_layers"]
        names = [f"{file['file']} (sha256 {file['sha256'][:12]})" for file in files]
        given = {name: value for name, value in models.items() if name not in _ALWAYS}
        more = "".join(f", {name}: {_listed(value)}" for name, value in given.items())
        return [
            f"model {names[0]}{''.join(f', drafting {name}' for name in names[1:])}; context {models['n_ctx']}, "
            f"threads: {models['n_threads']}, {layers} layers on the GPU{more}",
            f"drafter, if a setting names none: {self.drafter}",
            f"{machine['cpu']}, {machine['physical_cores']} physical cores, {machine['system']}; load before the run "
            f"{machine['load_before']}" + (f"; NOT RELIABLE: {why}" if why else ""),
            f"pyfly-cpp {machine['pyfly_cpp']} ({machine['simd']}), llama-cpp-python {machine['llama_cpp_python']}, "
            f"Python {machine['python']}; started {machine['started']}"
            + "".join(f", resumed {one['started']}" for one in resumed),
        ]


_ALWAYS = ("model", "drafter", "draft_files", "n_ctx", "n_threads", "gpu_layers", "chat_format", "lookup_texts_sha256")
_PLACED = {"rpc_servers", "devices", "tensor_split", "draft_devices"}


def _listed(value: Any) -> Any:
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else value


def preset_settings(models: Models) -> tuple[Decoding, ...]:
    """The setting of the preset, if there is one; without the governor, as all that do not ask for it."""
    return () if models.preset is None else (replace(models.setting(), adaptive=None).canonical(),)


def choose_settings(
    models: Models, written: Sequence[str], without_plain: bool, more: Sequence[Decoding] = ()
) -> list[Decoding]:
    """The settings to measure: plain and exact decoding, the preset, and those of --setting. Raises ValueError."""
    first = () if without_plain else (PLAIN,)
    return parse_settings(tuple(written), (*first, *more, EXACT, *preset_settings(models)))


def look_at_machine() -> dict[str, Any]:
    """The machine, before this program is the load; warns if it is busy."""
    machine = describe_machine()
    if (why := disturbance(machine)) is not None:
        warn(f"Warning: {why} The speeds cannot be trusted.")
    return machine


def open_session(
    models: Models, settings: Sequence[Decoding], n_parallel: int | None = None, outputs: Sequence[str | None] = ()
) -> Session:
    """Loads the target and, to see that they fit, all that draft for `settings`; warns if the machine is busy.

    Args:
        n_parallel: Requests at a time, each of n_ctx tokens, on a `ParallelGenerator`; None: one after the other.
        outputs: The files that will be written; none of them may be of a model.

    Raises:
        ValueError, PyflyError, UsageError: a file is missing or unfit, or options or settings do not go together.
    """
    machine = look_at_machine()
    resolved = models.resolved(settings)
    for output in outputs:
        if output:
            require_other(output, models.model, *files_of(resolved, settings))
    generator = models.load(load_generator, resolved, settings, n_parallel)
    drafters = generator.drafters
    llm, default = generator.llm, drafters.of(Decoding())
    said = {**models.arguments, **models.drafting}
    n_gpu_layers = said.pop("n_gpu_layers")
    described: dict[str, Any] = {
        **{name: value for name, value in said.items() if name != "verbose"},
        "model": describe_model(models.model),
        "drafter": [_without_folder(drafter_as_data(drafter)) for drafter in default.drafters],
        "draft_files": [describe_model(path) for path in files_of(drafters, settings)],
        "n_ctx": generator.n_ctx,
        "n_threads": said["n_threads"],
        "gpu_layers": n_gpu_layers if llama_cpp.llama_supports_gpu_offload() or _PLACED & said.keys() else 0,
        "chat_format": llm.chat_format,
    }
    if texts := texts_of(drafters, settings):
        described["lookup_texts_sha256"] = sha256(*texts)
    names = [f"{one} (if adaptive)" if one in default.may_be_left_out else str(one) for one in default.drafters]
    return Session(generator, machine, described, f"{' and '.join(names)} ({default.reason})")


def resume_if_interrupted(force: bool) -> None:
    """If Ctrl-C stops the command: that the same command, without --force, resumes it."""
    if_interrupted(f"Run the same command{', without --force,' if force else ''} to resume.")


def require_outputs(
    files: Sequence[str | None], force: bool, plot: str | None = None, prompts: Path | None = None
) -> bool:
    """Before any work: that these files can be written, each under a name of its own and none over `prompts`, and that
    `plot`, if it is wanted, can be drawn. Returns whether they may be overwritten: with `force`, or if a run is resumed
    that might. `files`: the first one is what an interrupted run is kept for (`journal.place`)."""
    kept = place(files[0], {}) if files[0] is not None else None
    may_overwrite = force or (kept is not None and kept.exists())
    taken = {os.path.realpath(path) for path in (kept, prompts) if path is not None}
    for file in (*files, plot):
        if file:
            require_free(file, may_overwrite)
            if (real := os.path.realpath(file)) in taken:
                raise ValueError(f"{file} is read or written for something else here; choose another name for it.")
            taken.add(real)
    if plot:
        require_matplotlib()
    return may_overwrite


_PIPED = 220
"""Columns of a table, at most, if stdout is no terminal."""


def terminal_width() -> int:
    """Columns of stdout; `_PIPED` if it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPED


def _longest_words(head: list[str], body: list[list[str]]) -> list[int]:
    """For each column."""
    return [max(len(word) for cell in column for word in cell.split(" ")) for column in zip(head, *body)]


def _show_list(title: str, head: list[str], body: list[list[str]]) -> None:
    """Prints what a table holds below one another, for narrow terminals."""
    write(f"{title}\n" if title else "")
    for first, *rest in body:
        write(f"{first or '-'}\n")
        for name, cell in zip(head[1:], rest):
            write(f"  {name}: {cell}\n")


def show_table(title: str, head: list[str], body: list[list[str]], width: int = _PIPED) -> None:
    """Prints a table to stdout, wrapped to the terminal, and to this width."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=min(width, terminal_width()))
    longest = _longest_words(head, body)
    if sum(longest) + 3 * len(longest) + 1 > console.width:
        _show_list(title, head, body)
        return
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else "right", min_width=longest[i])
    for row in body:
        table.add_row(*(Text(shown(cell, sys.stdout)) for cell in row))
    with console.capture() as drawn:
        console.print(table)
    write_marked(drawn.get())  # stdout may not be able to encode all of it
