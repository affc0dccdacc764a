"""The tables of the documents, made from records of `machine.py`.

    python benchmarks/tables.py                 writes them between their markers in the documents
    python benchmarks/tables.py --trace 1.85    where a number of them comes from: record, command, commit, day

A table stands between `<!-- table NAME -->` and `<!-- end -->`. What is written there by hand is lost. Figures of a
record that is older than the last change of the kernels or the governor have a star. Numbers written by hand
come from what is linked beside them: a record, which has its command, or a page.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import kernels
import loading
import numpy as np
import provenance
from common import markdown, read_record
from end_to_end import Row, answers_of, by_kind, differing
from sides import Answered, middle, ratio
from task_prompts import GROUPS

from pyfly_cpp.errors import counted

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
DOCUMENTS = tuple(
    ROOT / name for name in ("README.md", "docs/worth-it.md", "docs/design/claims.md", "benchmarks/results/kernels.md")
)

_BLOCK = re.compile(r"(?P<begin><!-- table (?P<name>[a-z-]+) -->\n)(?P<text>.*?)(?P<end><!-- end -->)", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_PASSAGE = re.compile(r"\n(?=\n|[|#]|[-*] )")
"""Between paragraphs, rows and items of lists."""
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")
"""To another file of this repository."""

ISA = {
    "avx2": "AVX2", "avxvnni": "AVX-VNNI", "avx512vnni": "AVX-512 VNNI", "amx": "AMX",
    "dotprod": "DotProd", "i8mm": "I8MM", "none": "no kernels of ours",
}  # fmt: skip
FILES = {"q4_k_m": "Q4_K_M", "q8_0": "Q8_0", "f16": "F16"}
SIZES = {"3b": "3B", "7b": "7B", "14b": "14B", "tiny": "tiny", "experts": "mixture of 32 experts (0.6B)"}
"""Steps `shape ...`, and how tables call them."""
TEMPERATURES = ("0", "0.7")
MODEL = "Qwen2.5-Coder-1.5B-Instruct"
NOTHING = "*Not measured yet.*"
BETWEEN = (3, 6, 12)
"""Tokens of a batch that tables leave out; records have them."""


# ---- Records and cells -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """A record."""

    path: Path
    data: Mapping[str, Any]
    more: str = ""
    """What tells it apart from records of other machines with the same processor."""

    @property
    def title(self) -> str:
        """Processor and instruction set; with a star if its kernels or governor were not the present ones."""
        machine = self.data["machine"]
        isa = ISA.get(machine["isa"], machine["isa"])
        star = "" if self.is_present else "\\*"
        return f"{machine['processor']}, {isa}{' (forced)' if machine['isa_is_forced'] else ''}{self.more}{star}"

    @property
    def is_present(self) -> bool:
        """Whether its kernels and governor are the present ones."""
        return bool(self.data["machine"]["timed_sources"] == provenance.fingerprint())

    def step(self, name: str) -> Any:
        """What a step measured; None if it is not there."""
        found = self.data["steps"].get(name)
        return None if found is None else found["measured"]

    def command(self, name: str) -> str:
        """The command of a step that is there."""
        machine = self.data["machine"]
        forced = f"PYFLY_ISA={machine['isa']} " if machine["isa_is_forced"] and machine["isa"] else ""
        return f"{forced}{self.data['steps'][name]['command']}"


class Source(NamedTuple):
    """Where a cell comes from."""

    record: Loaded
    step: str

    def __str__(self) -> str:
        step = self.record.data["steps"][self.step]
        where = os.path.relpath(self.record.path, ROOT)
        return f"{where}: {self.record.command(self.step)} (commit {step['commit']}, {day(step['started'])})"


class Cell(NamedTuple):
    """A cell of a table, or a sentence below it."""

    text: str
    sources: tuple[Source, ...] = ()


@dataclass
class Table:
    """A table: its head, its rows, and the sentences below it."""

    head: Sequence[Cell]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[Cell] = field(default_factory=list)

    def cells(self) -> Iterator[Cell]:
        """All its cells."""
        for row in (self.head, *self.rows, self.notes):
            yield from row

    def text(self) -> str:
        """As it stands in a document, without the markers."""
        if not self.rows:
            return f"\n{NOTHING}\n\n"
        body = markdown([cell.text for cell in self.head], [[cell.text for cell in row] for row in self.rows])
        notes = " ".join(cell.text for cell in self.notes)
        return f"\n{body}\n\n{notes}\n\n" if notes else f"\n{body}\n\n"


def words(*texts: str) -> list[Cell]:
    """Cells without numbers that were measured."""
    return [Cell(text) for text in texts]


def day(started: str) -> str:
    """`1 December 2026`."""
    when = datetime.fromisoformat(started)
    return f"{when.day} {when:%B %Y}"


def read_records(folder: Path = RECORDS) -> list[Loaded]:
    """The records of machines in the order of their files' names, without those of `--quick`. Raises SystemExit if one
    cannot be read."""
    paths = sorted(folder.glob("machine-*.json.gz"))
    out = [Loaded(path, data) for path, data in zip(paths, map(read_record, paths)) if not data["quick"]]
    for apart in (_threads, _file):
        titles = Counter(one.title for one in out)
        out = [replace(one, more=f"{one.more}, {apart(one)}") if titles[one.title] > 1 else one for one in out]
    return out


def _threads(record: Loaded) -> str:
    return counted(record.data["machine"]["threads"], "thread")


def _file(record: Loaded) -> str:
    return record.path.name.partition(".")[0]


def link(record: Loaded, document: Path) -> str:
    """A link to a record, from a document."""
    return f"[record]({os.path.relpath(record.path, document.parent)})"


# ---- What several tables compute -------------------------------------------------------------------------------------


def answered(
    record: Loaded, file: str, temperature: str, without_drafts: bool = False
) -> tuple[list[Row], tuple[Source, ...]]:
    """Answers as shipped, and their steps; empty if there are none. `without_drafts`: those that were also made without
    drafts, which leaves out long documents."""
    has_long = temperature == "0" and not without_drafts
    names = [f"answers {file} {temperature}", *([f"long documents {file}"] if has_long else [])]
    there = [name for name in names if record.step(name) is not None]
    return [row for name in there for row in record.step(name)], tuple(Source(record, name) for name in there)


def of_step(records: Sequence[Loaded], step: str) -> Iterator[tuple[Loaded, Any, tuple[Source, ...]]]:
    """The records that have a step, what it measured, and where that comes from."""
    for record in records:
        if (found := record.step(step)) is not None:
            yield record, found, (Source(record, step),)


def by_group(kinds: Mapping[str, float]) -> dict[str, float]:
    """Geometric means over the kinds of each group that are there."""
    found = {group: [kinds[kind] for kind in own if kind in kinds] for group, own in GROUPS.items()}
    return {group: geometric_mean(values) for group, values in found.items() if values}


def times(value: float) -> str:
    """`1.67x`."""
    return f"{value:.2f}x"


def average(kinds: Mapping[str, float]) -> str:
    """Over kinds, likewise; empty if there are none."""
    return times(geometric_mean(kinds.values())) if kinds else ""


def conditions(
    record: Loaded, sources: tuple[Source, ...], document: Path, more: str = "", drafts: bool = True
) -> Cell:
    """A sentence on how a table was measured. `drafts`: whether the demo model drafts there."""
    begun = day(record.data["steps"][sources[0].step]["started"])
    machine = record.data["machine"]
    demo = f", {'with' if machine['has_demo_model'] else 'without'} the demo model" if drafts else ""
    version = "" if record.is_present else ", an earlier version"
    return Cell(
        f"{record.title}: {_threads(record)}{demo}{more}, {begun}{version} ({link(record, document)}).", sources
    )


def asked(rows: Sequence[Row]) -> str:
    """How much was answered."""
    most = max(len(one.tokens) for one in answers_of(rows, "auto"))
    held_out = sum(row["held_out"] for row in rows)
    return f"{counted(len(rows), 'prompt')} ({held_out} held out), answers of up to {counted(most, 'token')}"


def rows_of_steps(counters: Mapping[str, Any]) -> dict[int, int]:
    """How many steps of an answer evaluated 1, 2, ... tokens: a step with d drafts is among those that drafted at
    depths 1 to d. The first step is one of them, since its drafts are counted with the others."""
    at_least = [counters["rounds"], *counters["drafted_at_depth"]]
    exactly = [n - after for n, after in zip(at_least, [*at_least[1:], 0])]
    return {d + 1: n for d, n in enumerate(exactly) if n > 0}


def estimated(rows: Sequence[Row], costs: kernels.Costs) -> dict[str, float]:
    """How much faster than plain llama.cpp a larger model would answer, for each kind: its own costs of batches, and
    the drafts and their acceptance of the model that answered. Drafting takes the time that it took there."""
    stock, ours = (kernels.seconds_of(costs, i) for i in (0, 1))
    sizes = sorted(ours)
    out: dict[str, list[float]] = {}
    for row in rows:
        counters = Answered(*row["answers"]["auto"]).counters
        if counters is None or counters["committed"] == 0:
            continue
        steps = rows_of_steps(counters)
        batches = sum(
            n_steps * float(np.interp(size, sizes, [ours[one] for one in sizes])) for size, n_steps in steps.items()
        )
        out.setdefault(row["kind"], []).append(counters["committed"] * stock[1] / (batches + counters["seconds_draft"]))
    return {kind: geometric_mean(values) for kind, values in out.items()}


# ---- The tables ------------------------------------------------------------------------------------------------------


def speed(records: Sequence[Loaded], document: Path) -> Table:
    """README's: as shipped, by what is asked for."""
    found = [
        (record, temperature, *answered(record, "q4_k_m", temperature))
        for record in records
        for temperature in TEMPERATURES
    ]
    found = [one for one in found if one[2]]
    table = Table([*words("you ask for"), *(Cell(f"{one[0].title}, temperature {one[1]}", one[3]) for one in found)])
    by_kinds = [by_kind(rows, "auto") for _, _, rows, _ in found]
    columns = [by_group(kinds) for kinds in by_kinds]
    for group in GROUPS:
        own = [kind for kind in GROUPS[group] if any(kind in kinds for kinds in by_kinds)]
        is_same = all(kind in kinds for kinds in by_kinds for kind in own)
        if own:
            table.rows.append([
                Cell(f"{group} ({', '.join(own)})" if is_same and len(GROUPS[group]) > 1 else group),
                *(Cell(times(column[group]) if group in column else "", one[3]) for column, one in zip(columns, found)),
            ])  # fmt: skip
    for record, temperature, _, sources in found:
        if temperature == TEMPERATURES[0]:
            table.notes.append(conditions(record, sources, document))
    return table


def as_shipped(records: Sequence[Loaded], document: Path) -> Table:
    """Every file at every temperature, by kind."""
    head = [
        "your file",
        "processor",
        "temperature",
        "average",
        "without drafts",
        "held-out prompts",
        "slowest kind",
        "by kind of prompt",
        "answers that drafts changed",
        "asked",
    ]
    table = Table(words(*head))
    for record in records:
        for file, name in FILES.items():
            for temperature in TEMPERATURES:
                rows, sources = answered(record, file, temperature, without_drafts=True)
                kinds, plain = by_kind(rows, "auto"), by_kind(rows, "plain")
                if not kinds:
                    continue
                held = by_kind([row for row in rows if row["held_out"]], "auto")
                in_order = sorted(kinds.items(), key=lambda pair: -pair[1])
                by_speed = [f"{kind} {times(value)}" for kind, value in in_order]
                cells = [
                    f"**{average(kinds)}**", average(plain), average(held), *by_speed[-1:], ", ".join(by_speed),
                    f"{differing(rows, 'auto')} of {len(rows)}", asked(rows),
                ]  # fmt: skip
                table.rows.append([*words(name, record.title, temperature), *(Cell(text, sources) for text in cells)])
                table.notes.append(conditions(record, sources, document))
    table.notes = list({note.text: note for note in table.notes}.values())
    return table


def stock_lookup(records: Sequence[Loaded], document: Path) -> Table:
    """llama-cpp-python's own prompt lookup."""
    sides = {
        "stock lookup": "its lookup, 10 tokens",
        "stock lookup 2": "its lookup, 2 tokens",
        "auto": "pyfly-cpp as shipped",
    }
    table = Table(words("kind of prompt", "processor", *sides.values()))
    for record, rows, source in of_step(records, "stock lookup q4_k_m"):
        means = {side: by_kind(rows, side) for side in sides}
        for kind in means["auto"]:
            ratios = [Cell(times(means[side][kind]) if kind in means[side] else "", source) for side in sides]
            table.rows.append([*words(kind, record.title), *ratios])
        table.notes.append(conditions(record, source, document, f", {asked(rows)}"))
    if table.rows:
        table.notes += words("With fewer prompts of each kind, these differ from the table above.")
    return table


def long_documents(records: Sequence[Loaded], document: Path) -> Table:
    """Seconds to the first token of a summary of 8,000 tokens, and the speed then."""
    table = Table(words("processor", "", "first token", "tokens/s after it", "as shipped / plain"))
    for record, rows, source in of_step(records, "long documents q4_k_m"):
        stock, ours = (answers_of(rows, name) for name in ("llama.cpp", "auto"))
        for name, answers in (("plain `llama_cpp.Llama`", stock), ("pyfly-cpp as shipped", ours)):
            gain = median(ratio(ours, stock, "speed")) if answers is ours else None
            table.rows.append([
                *words(record.title, name), Cell(f"{middle(answers, 'first'):.0f} s", source),
                Cell(f"{middle(answers, 'speed'):.1f}", source), Cell("" if gain is None else times(gain), source),
            ])  # fmt: skip
        tokens = ", ".join(f"{row['n_prompt']:,}" for row in rows)
        table.notes.append(conditions(record, source, document, f", a prompt of {tokens} tokens"))
    return table


def requests(records: Sequence[Loaded], document: Path) -> Table:
    """Several at a time."""
    table = Table(words("processor", "requests", "tokens/s", "x one request", "with prompt lookup, x without"))
    for record, rows, source in of_step(records, "requests q4_k_m"):
        wall = {(row["way"], row["n"]): row["wall"] for row in rows}
        sizes = sorted({row["n"] for row in rows})
        for n in sizes:
            alone = "" if n == sizes[0] else times(wall["plain", n] / wall["plain", sizes[0]])
            cells = [f"{wall['plain', n]:.1f}", alone, times(wall["lookup:governed", n] / wall["plain", n])]
            table.rows.append([*words(record.title, str(n)), *(Cell(text, source) for text in cells)])
        table.notes.append(conditions(record, source, document, ", with the time for prompts", drafts=False))
    return table


def server(records: Sequence[Loaded], document: Path) -> Table:
    """One client of each server."""
    table = Table(words("processor", "server", "tokens/s", "x llama.cpp's"))
    for record, rows, source in of_step(records, "server q4_k_m"):
        rates = {
            way: median(row["rate"] for row in rows if row["way"] == way)
            for way in dict.fromkeys(r["way"] for r in rows)
        }
        for way, rate in rates.items():
            cells = (Cell(f"{rate:.1f}", source), Cell(times(rate / rates["llama.cpp"]), source))
            table.rows.append([*words(record.title, way), *cells])
        table.notes.append(conditions(record, source, document))
    return table


def _shapes(record: Loaded) -> Iterator[tuple[str, kernels.Costs, Source]]:
    """Costs of larger shapes, by the names of tables."""
    for size, name in SIZES.items():
        if (found := record.step(f"shape {size}")) is not None:
            yield name, found[0], Source(record, f"shape {size}")


def larger(records: Sequence[Loaded], document: Path) -> Table:
    """What batches of larger models cost: measured, with made-up weights."""
    head = [
        "shape",
        "processor",
        "llama.cpp, one token",
        "ours, one token",
        "llama.cpp / ours",
        "ours, 4 tokens / 1",
        "8 / 1",
        "16 / 1",
    ]
    table = Table(words(*head))
    for record in records:
        for name, costs, source in _shapes(record):
            stock, ours = (kernels.seconds_of(costs, i) for i in (0, 1))
            cells = [f"{1e3 * stock[1]:.0f} ms", f"{1e3 * ours[1]:.0f} ms", times(stock[1] / ours[1])]
            cells += [f"{ours[n] / ours[1]:.2f}" if n in ours else "" for n in (4, 8, 16)]
            table.rows.append([Cell(text, (source,)) for text in (name, record.title, *cells)])
        if sources := tuple(source for _, _, source in _shapes(record)):
            table.notes.append(conditions(record, sources, document, ", Q4_K_M", drafts=False))
    return table


def estimates(records: Sequence[Loaded], document: Path) -> Table:
    """Of larger models: their costs, the acceptance of the 1.5B."""
    table = Table(words("estimate for", "processor", "llama.cpp, tokens/s", "without drafts", *GROUPS))
    for record in records:
        rows, sources = answered(record, "q4_k_m", "0", without_drafts=True)
        if not rows:
            continue
        itself = record.step("costs q4_k_m")
        known = [] if itself is None else [("the 1.5B itself", itself[0], Source(record, "costs q4_k_m"))]
        for name, costs, source in (*known, *_shapes(record)):
            if "experts" in name:  # no dense model's drafts
                continue
            stock, ours = (kernels.seconds_of(costs, i) for i in (0, 1))
            groups = by_group(estimated(rows, costs))
            cells = [f"{1 / stock[1]:.1f}", times(stock[1] / ours[1])]
            cells += [times(groups[group]) if group in groups else "" for group in GROUPS]
            table.rows.append([Cell(text, (source, *sources)) for text in (name, record.title, *cells)])
        groups = by_group(by_kind(rows, "auto"))
        cells = [times(groups[group]) if group in groups else "" for group in GROUPS]
        plain = average(by_kind(rows, "plain"))
        speed_of_stock = f"{middle(answers_of(rows, 'llama.cpp'), 'speed'):.1f}"
        measured = ("(the 1.5B, measured)", record.title, speed_of_stock, plain, *cells)
        table.rows.append([Cell(text, sources) for text in measured])
    return table


def _costs(records: Sequence[Loaded], document: Path, steps: Iterable[tuple[str, str]]) -> Table:
    """Costs of batches of a step each, called by what they are of."""
    table = Table(
        words("file", "processor", "behind", "tokens", "llama.cpp, ms", "ours, ms", "llama.cpp / ours", "ours, of 1")
    )
    for record in records:
        for name, step in steps:
            for costs in record.step(step) or ():
                stock, ours = (kernels.seconds_of(costs, i) for i in (0, 1))
                for n in ours:
                    if n in BETWEEN:
                        continue
                    cells = [f"{costs['behind']:,}", str(n), f"{1e3 * stock[n]:.1f}", f"{1e3 * ours[n]:.1f}"]
                    cells += [f"{stock[n] / ours[n]:.2f}", f"{ours[n] / ours[1]:.2f}"]
                    sourced = [Cell(text, (Source(record, step),)) for text in cells]
                    table.rows.append([*words(name, record.title), *sourced])
        if sources := tuple(Source(record, step) for _, step in steps if record.step(step) is not None):
            table.notes.append(conditions(record, sources, document, drafts=False))
    return table


def costs(records: Sequence[Loaded], document: Path) -> Table:
    """Of batches by their size."""
    return _costs(records, document, [(name, f"costs {file}") for file, name in FILES.items()])


def costs_long(records: Sequence[Loaded], document: Path) -> Table:
    """Of batches and prompts behind long beginnings."""
    return _costs(records, document, [("Q4_K_M", "costs q4_k_m long")])


def loads(records: Sequence[Loaded], document: Path) -> Table:
    """Loading and memory."""
    table = Table(words("side", "processor", "seconds", "of llama.cpp's", "memory after loading", "at most"))
    for record, measured, source in of_step(records, "loading"):
        for i, ((choice, is_mapped), own) in enumerate(zip(measured["sides"], measured["loads"])):
            base = measured["loads"][i - i % 2]
            slower = median(mine["seconds"] / stock["seconds"] for mine, stock in zip(own, base))
            sizes = [median(one[name] for one in own) / measured["file_bytes"] for name in ("after", "most")]
            cells = [f"{median(one['seconds'] for one in own):.2f}", times(slower) if i % 2 else ""]
            cells += [f"{size:.2f} of the file" for size in sizes]
            name = f"{loading.NAMES[choice]}, {'mapped' if is_mapped else 'read'}"
            table.rows.append([*words(name, record.title), *(Cell(text, source) for text in cells)])
        table.notes.append(conditions(record, source, document, drafts=False))
    return table


def claims(records: Sequence[Loaded], document: Path) -> Table:
    """The commands behind README's table."""
    table = Table(words("figures of README's table", "command", "where"))
    for record in records:
        for temperature in TEMPERATURES:
            rows, sources = answered(record, "q4_k_m", temperature)
            if rows:
                what = ", ".join(f"{group} {times(gain)}" for group, gain in by_group(by_kind(rows, "auto")).items())
                commands = "; ".join(f"`{record.command(one.step)}`" for one in sources)
                head = f"{record.title}, temperature {temperature}: {what}"
                table.rows.append([Cell(head, sources), Cell(commands), Cell(link(record, document))])
    return table


TABLES: dict[str, Callable[[Sequence[Loaded], Path], Table]] = {
    "speed": speed, "as-shipped": as_shipped, "stock-lookup": stock_lookup, "long-documents": long_documents,
    "requests": requests, "server": server, "larger": larger, "estimates": estimates, "costs": costs,
    "costs-long": costs_long, "loading": loads, "claims": claims,
}  # fmt: skip
"""By their names in the markers."""


# ---- The documents ---------------------------------------------------------------------------------------------------


def tables_of(document: Path, records: Sequence[Loaded]) -> dict[str, Table]:
    """The tables that a document has markers for. Raises SystemExit: a marker names no table."""
    names = [found["name"] for found in _BLOCK.finditer(document.read_text(encoding="utf-8"))]
    for name in names:
        if name not in TABLES:
            raise SystemExit(f"{document}: there is no table {name!r}; there are {', '.join(TABLES)}.")
    return {name: TABLES[name](records, document) for name in names}


def written(document: Path, records: Sequence[Loaded]) -> str:
    """The document with its tables as they should be."""
    tables = tables_of(document, records)
    return _BLOCK.sub(
        lambda found: f"{found['begin']}{tables[found['name']].text()}{found['end']}",
        document.read_text(encoding="utf-8"),
    )


def numbers(text: str) -> list[str]:
    """Those that stand in a text, without links and code."""
    return _NUMBER.findall(re.sub(r"\]\([^)]*\)|`[^`]*`", "", text))


def passages(document: Path) -> list[str]:
    """What was written by hand: its paragraphs, rows and items, each in a line, without code."""
    text = _CODE.sub("", _BLOCK.sub("\n\n", document.read_text(encoding="utf-8")))
    return [" ".join(found.split()) for found in _PASSAGE.split(text) if found.strip()]


def linked(passage: str, document: Path) -> Iterator[str]:
    """The files of this repository that a passage names, records with their commands."""
    for target in dict.fromkeys(_LINK.findall(passage)):
        file, _, anchor = target.partition("#")
        path = Path(os.path.normpath(document.parent / file))
        where = f"{os.path.relpath(path, ROOT)}{anchor and '#'}{anchor}"
        data = read_record(path) if path.name.endswith(".json.gz") else {}
        if "command" in data:
            yield f"{where}: {data['command']} ({day(data['machine']['started'])})"
        else:
            yield where


def trace(number: str, documents: Sequence[Path], records: Sequence[Loaded]) -> list[str]:
    """A line for each place at which a number stands, with each of its sources: those of a table's cell, or the files
    that a passage which was written by hand names."""
    wanted, out = number.strip("x* "), []
    for document in documents:
        for name, table in tables_of(document, records).items():
            for cell in table.cells():
                if wanted in numbers(cell.text):
                    out += [f"{document.name}, table {name}, {cell.text!r}: {source}" for source in cell.sources]
        for passage in passages(document):
            if wanted in numbers(passage):
                out += [f"{document.name}, {passage!r}: {source}" for source in linked(passage, document)]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", metavar="NUMBER", help="print the record and the command of a number")
    given = parser.parse_args()
    records = read_records()
    if given.trace is not None:
        lines = trace(given.trace, DOCUMENTS, records)
        if not lines:
            raise SystemExit(f"no source is named in {', '.join(path.name for path in DOCUMENTS)} for {given.trace}.")
        return print("\n".join(lines))
    for document in DOCUMENTS:
        text = written(document, records)
        if text != document.read_text(encoding="utf-8"):
            document.write_text(text, encoding="utf-8")
            print(f"{os.path.relpath(document, ROOT)}: written")


if __name__ == "__main__":
    main()
