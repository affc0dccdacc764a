"""What the scripts of this folder share: the machine's line, prompts, tables."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import statistics
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pyfly_cpp.machine.conditions import describe_machine, disturbance
from pyfly_cpp.machine.threads import physical_cores
from pyfly_cpp.measure.report import markdown_row
from pyfly_cpp.models.named import model_file


def print_machine() -> dict[str, Any]:
    """What the numbers below depend on, for `record` as well."""
    machine = describe_machine()
    print(
        f"machine: {machine['cpu']}, {machine['physical_cores']} physical cores, {platform.system()}; load before the "
        f"run {machine['load_before']}\n"
        f"software: pyfly-cpp {machine['pyfly_cpp']} ({machine['simd']}), llama-cpp-python "
        f"{machine['llama_cpp_python']}, Python {machine['python']}"
    )
    if (why := disturbance(machine)) is not None:
        print(f"NOT IDLE: {why} The speeds below are not to be believed.")
    return machine


def model_parser(about: str | None, n: int) -> argparse.ArgumentParser:
    """Options of a script that generates with one model; `n`: tokens of an answer where nothing is said."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=model_path)
    parser.add_argument("-n", type=positive, default=n, help=f"tokens of an answer (default {n})")
    add_threads(parser)
    return parser


def add_threads(parser: argparse.ArgumentParser) -> None:
    """The option for the number of threads, at least 1."""
    parser.add_argument("--threads", type=positive, default=physical_cores(), metavar="N")


def positive(text: str) -> int:
    """A number from 1 on, for argparse."""
    if (n := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{n} is not at least 1")
    return n


def model_path(text: str) -> str:
    """The file of a model, for argparse."""
    try:
        return model_file(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def llama_options(given: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `Llama` that these options give."""
    return {"n_threads": given.threads, "n_threads_batch": given.threads, "verbose": False}


def add_record(parser: argparse.ArgumentParser) -> None:
    """The option for `record`."""
    parser.add_argument(
        "--record", metavar="FILE", type=_to_write, help="where all that was measured is written, as compressed JSON"
    )


def _to_write(text: str) -> str:
    """A file in a folder that is there, for argparse: else all would be measured in vain."""
    folder = Path(text).parent
    if Path(text).is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; name a file in a folder of yours")
    return text


def record(path: str | None, machine: dict[str, Any], measured: Any) -> None:
    """Writes what was measured, with the command and the machine as it was before, as compressed JSON; without a path
    nothing."""
    if path is None:
        return
    command = " ".join(Path(word).name if "/" in word else word for word in sys.argv)
    text = json.dumps({"command": command, "machine": machine, "measured": measured}, indent=1)
    Path(path).write_bytes(gzip.compress(text.encode(), mtime=0))


def read_record(path: Path) -> dict[str, Any]:
    """A record. Raises SystemExit if its file is damaged."""
    try:
        return dict(json.loads(gzip.decompress(path.read_bytes())))
    except (OSError, EOFError, ValueError, TypeError, zlib.error) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from None


def spread(ratios: Sequence[float]) -> str:
    """Median and range; empty where there are none."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, the first column aligned to the left."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(map(markdown_row, lines))
