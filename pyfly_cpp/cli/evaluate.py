"""`pyfly-cpp eval`: what loose acceptance costs on a task."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import get_args

import click

from pyfly_cpp.cli.headings import HeadedCommand, declares, more, number, sampling
from pyfly_cpp.cli.kinds import FILE, FOLDER, PARALLEL_COUNT, SEED, Int, Written
from pyfly_cpp.cli.loading import Models, model_options
from pyfly_cpp.cli.measuring import choose_settings, open_session, resume_if_interrupted, show_table
from pyfly_cpp.cli.options import TEMPERATURE_OPTION
from pyfly_cpp.cli.progress import progress_bar
from pyfly_cpp.cli.terminal import note, write, write_sentences
from pyfly_cpp.decoding import require_repeatable, written
from pyfly_cpp.errors import counted
from pyfly_cpp.machine.files import sha256, write_atomically
from pyfly_cpp.machine.rows import DataError, Row, spread
from pyfly_cpp.measure import evaluation, journal, report
from pyfly_cpp.measure.generator import Sampling
from pyfly_cpp.measure.quality import summarise
from pyfly_cpp.measure.tasks.code import CodeTask
from pyfly_cpp.measure.tasks.needle import Needle
from pyfly_cpp.measure.tasks.registry import TASKS, get_task
from pyfly_cpp.measure.tasks.sandbox import NOT_CONTAINED, Containment
from pyfly_cpp.measure.tasks.task import Item, Task

HELP = f"""Run TASK with plain, exact and loose decoding on the same items, and compare them.

TASK is one of {", ".join(TASKS)}.

\b
Example:
  pyfly-cpp eval gsm8k --data gsm8k_test.jsonl -m target.gguf \\
      -d draft.gguf -s margin:0.3 -s entropy:0.3 --limit 60 -o runs/gsm8k

{written()}

If a run is interrupted, run the same command (without --force) to resume. The folder of --output gets
run.json, items.jsonl (a line for each item and setting), table.json and table.md. The items of needle are generated;
writing has no data set on the hub.

humaneval and mbpp execute code that the model writes, and only with --allow-code-execution: in a process with limits on
CPU, memory, files and time, which bubblewrap keeps away from the network, your files and your other processes. Without
bubblewrap they do not run, unless you give --containment none. This protects against accidents, not against
an adversary; see the documentation."""


_OPTIONS = [
    click.option("--data", type=FILE,
                 help="Items, JSONL.  [default: from the hub, through the package `datasets`]"),
    more("--examples", type=FILE, help="JSONL file of worked examples.  [default: with --few-shot, from the hub]"),
    number("--few-shot", declare=more, kind=Int(0), help="Worked examples before each item.  [default: with "
           "--examples the task's usual number, otherwise 0]"),
    click.option("-s", "--setting", "settings", multiple=True, metavar="TEXT",
                 help="A setting to compare; can be repeated."),
    more("--without-plain", is_flag=True,
         help="Leave plain decoding out: it is slow, and answers as exact does, except for near ties."),
    number("--limit", kind=Int(1),
           help="Take N items, spread evenly over the task's prompts, subjects or languages."),
    click.option("-o", "--output", type=FOLDER, help="Folder of the run.  [default: pyfly-eval-TASK]"),
    more("--force", is_flag=True, help="Start over: delete the run in the folder."),
    number("-n", "--max-tokens", kind=Int(1), help="Maximum answer length in tokens.  [default: the task's]"),
    TEMPERATURE_OPTION,
    number("--seed", declare=sampling, kind=SEED, default=0, help="Seed for sampling, and for needle."),
    number("--parallel", kind=PARALLEL_COUNT, default=1,
           help="Requests at a time, of --n-ctx tokens; auto: as many as fit in a quarter of the free memory, 8 at "
           "most. The speeds are then the throughput of all."),
    click.option("--allow-code-execution", is_flag=True, help="Let humaneval and mbpp run code that the model writes."),
    more("--containment", type=click.Choice(get_args(Containment)), default="bubblewrap",
         help="Sandbox for code that the model wrote; none: only limits on time and memory, so it can read and change "
         "your files, and reach the network."),
    number("--needle-words", declare=more, kind=Int(1), default=800, help="Length of a haystack."),
    number("--needle-values", declare=more, kind=Int(1), default=4, help="Values hidden in a haystack."),
    more("--json", "as_json", is_flag=True, help="Print the table as JSON."),
]  # fmt: skip


@click.command("eval", cls=HeadedCommand, help=HELP)
@click.argument("task_name", type=Written("task", words=lambda _: TASKS), metavar="TASK")
@declares(_OPTIONS)
@model_options
def command(
    task_name: str,
    data: str | None,
    examples: str | None,
    few_shot: int | None,
    settings: tuple[str, ...],
    without_plain: bool,
    limit: int | None,
    output: str | None,
    force: bool,
    max_tokens: int | None,
    temperature: float,
    seed: int,
    parallel: int | str,
    allow_code_execution: bool,
    containment: Containment,
    needle_words: int,
    needle_values: int,
    as_json: bool,
    models: Models,
) -> None:
    resume_if_interrupted(force)
    task = get_task(task_name)
    if isinstance(task, CodeTask):
        task = type(task)(task.limits, containment)
    chosen = choose_settings(models, settings, without_plain)
    require_repeatable(chosen)
    evaluation.require_permission(task, allow_code_execution)
    items, source = _read_items(task, data, limit, needle_words, needle_values, seed)
    worked, items, few_shot = _read_examples(task, items, examples, few_shot)
    items = spread(items, limit, task.kind, lambda item: item.unit)
    n_least = min(len(task.pick_examples(item, worked, few_shot)) for item in items)
    if n_least < few_shot:
        raise DataError(
            f"there is only {counted(n_least, 'worked example')} for some items, not {few_shot}; give --few-shot "
            f"{n_least}."
        )
    folder = Path(output or f"pyfly-eval-{task.name}")
    n_parallel = _resolve_parallel(parallel, models, None if force else folder)
    session = open_session(models, chosen, None if n_parallel == 1 else n_parallel)
    conditions = {**session.conditions(), "data_sha256": _sha256(data, items)}
    conditions["examples_sha256"] = _sha256(examples, worked) if few_shot else None
    if n_parallel > 1:
        conditions["parallel"] = n_parallel
    if task.name == "needle" and not data:
        conditions.update(needle_words=needle_words, needle_values=needle_values)
    plan = evaluation.Plan(
        task, items, chosen, worked, few_shot, max_tokens or task.max_tokens, Sampling(temperature, seed),
        allow_code_execution, tuple(conditions.items()),
    )  # fmt: skip
    if task.runs_code:
        contained = "model code is contained by: bubblewrap, limits"
        note(NOT_CONTAINED if containment == "none" else contained)
    with progress_bar(task.name, len(items), len(chosen)) as advance:

        def progress(done: int, _: int, line: Row) -> None:
            advance(done, f"{line['item']} {line['setting']}")

        lines = evaluation.run(plan, session.generator, folder, force, session.machine, progress)
    table = summarise(lines, [str(s) for s in chosen], len(items), task.title, task.criterion)
    facts = [
        f"{counted(len(items), 'item')} of {source}; {counted(few_shot, 'worked example')}; at most "
        f"{plan.max_tokens} tokens; "
        f"temperature {temperature:g}",
        *session.facts(journal.starts(folder)),
    ]
    if n_parallel > 1:
        facts.append(f"{n_parallel} requests at a time: tokens/s of all together, prompts counted apart")
    page = report.task_page(table, facts)
    text = json.dumps({"run": plan.identity(), "table": table.as_dict()}, indent=1, ensure_ascii=False) + "\n"
    write_atomically(folder / journal.TABLE_JSON, text)
    write_atomically(folder / journal.TABLE_MARKDOWN, page)
    if as_json:
        write(text)
    else:
        together = f", {n_parallel} requests at a time" if n_parallel > 1 else ""
        show_table(f"{table.title}, n = {table.n_complete}{together}", *report.short_task_cells(table), width=100)
        for sentence in report.task_notes(table):
            write_sentences(sentence)
    note(f"Written to {folder}; all columns are in {journal.TABLE_MARKDOWN}")


def _resolve_parallel(parallel: int | str, models: Models, folder: Path | None) -> int:
    """Requests at a time; "auto": as many as the run in `folder` began with, if there is one."""
    if isinstance(parallel, int):
        return parallel
    known = None if folder is None else journal.read_run(folder)
    return models.choose_parallel() if known is None else int(known["identity"].get("parallel", 1))


def _read_items(
    task: Task, data: str | None, limit: int | None, needle_words: int, needle_values: int, seed: int
) -> tuple[list[Item], str]:
    """The items, and where they are from, for people."""
    if data is not None:
        return task.read(data), Path(data).name
    if isinstance(task, Needle):
        return task.generate(limit or 20, needle_words, needle_values, seed), "generated data"
    return task.read_hub(), " and ".join(map(str, task.hub))


def _sha256(path: str | None, items: list[Item]) -> str:
    """The hash of a data file, else of the items made or fetched: another revision is another run."""
    return sha256(path) if path else hashlib.sha256(repr(items).encode("utf-8")).hexdigest()


def _read_examples(
    task: Task, items: list[Item], path: str | None, few_shot: int | None
) -> tuple[list[Item], list[Item], int]:
    """Worked examples, the items that are none of them, and how many examples to show. Says what it leaves out."""
    if path is None and not few_shot:
        return [], items, 0
    n = task.few_shot if few_shot is None else few_shot
    examples = task.read(path) if path is not None else task.read_hub(examples=True)
    if n or few_shot is None:
        task.worked_answer(examples[0])  # raises where the task has none
    picked = {task.question(example) for item in items for example in task.pick_examples(item, examples, n)}
    left = [item for item in items if task.question(item) not in picked]
    if len(left) < len(items):
        what = counted(len(items) - len(left), "item is a worked example", "items are worked examples")
        note(f"{what} and not evaluated.")
    if not left:
        raise DataError("every item is a worked example; give other --examples.")
    return examples, left, n
