"""`pyfly-cpp tune --judge`: trains a gate."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from pyfly_cpp.bench.judge import Learned, MiningFile, learn, mine
from pyfly_cpp.bench.prompts import BenchPrompt
from pyfly_cpp.cli import if_interrupted
from pyfly_cpp.cli.headings import number
from pyfly_cpp.cli.kinds import Int, Real
from pyfly_cpp.cli.loading import Models
from pyfly_cpp.cli.measuring import require_outputs, show_table
from pyfly_cpp.cli.progress import progress_bar
from pyfly_cpp.cli.terminal import note, write_sentences
from pyfly_cpp.decoding import Decoding
from pyfly_cpp.decoding.drafters import require_drafters
from pyfly_cpp.decoding.gates import FEATURES
from pyfly_cpp.decoding.gates.judge import judge_as_dict
from pyfly_cpp.evaluation.drafting import files_of, load_generator
from pyfly_cpp.evaluation.machine import describe_model
from pyfly_cpp.evaluation.parallel import ParallelGenerator
from pyfly_cpp.evaluation.statistics import for_json
from pyfly_cpp.machine.files import write_atomically

JUDGE_OPTIONS = [
    click.option("--judge", "judge_file", metavar="FILE", help="Train a gate and write it here, instead of a preset."),
    number("--lost-share", kind=Real(0), default=0.05, help="With --judge: most harmful tokens per answer."),
    number("--mismatches", kind=Int(1), default=16, help="With --judge: tokens of each answer that are tried."),
    click.option("--mined", "mined_file", metavar="FILE", help="With --judge: keep what was tried here, to resume and "
                 "for other fits.  [default: FILE.mined.jsonl]"),
]  # fmt: skip


def train_judge(
    output: str,
    prompts: Sequence[BenchPrompt],
    max_tokens: int,
    models: Models,
    force: bool,
    lost_share: float,
    mismatches: int,
    mined_file: str | None,
) -> None:
    """Mines what is not mined yet, fits, and writes the judge. Raises ValueError if it is worth nothing."""
    if_interrupted("Progress is saved; run the same command to resume.")
    require_outputs((output,), force)
    setting = Decoding()
    drafters, _ = models.drafters([setting])
    trained = {
        "model": describe_model(models.model),
        "drafter": " and ".join(one.word for one in require_drafters(drafters.of(setting))),
        "draft_files": [describe_model(path) for path in files_of(drafters, [setting])],
        "max_tokens": max_tokens,
        "mismatches": mismatches,
    }
    file = MiningFile(mined_file or f"{output}.mined.jsonl", {**trained, "features": FEATURES})
    n_left = len(prompts) - len(file.mined(prompts))
    if n_left:
        note(
            f"{n_left} answers and at most {n_left * mismatches} continuations of them, of at most {max_tokens} tokens "
            "each"
        )
        generator = models.load(load_generator, drafters, [setting], models.choose_parallel())
        assert isinstance(generator, ParallelGenerator)
        with progress_bar(len(prompts), "prompts") as bar:
            mine(generator, prompts, file, max_tokens, mismatches, lambda done, n: bar(done, "mining", n))
    learned = learn(file.mined(prompts), lost_share, output)
    show_table("", *_cells(learned))
    held = learned.held
    write_sentences(
        f"On prompts that it was not fitted to, the judge accepts {held.accepted:.0%} of the mismatches, with "
        f"{held.lost:.3g} harmful tokens per answer: {learned.n_mismatches} mismatches of {learned.n_prompts} prompts, "
        f"{learned.n_harmful} of them harmful. Nothing is known about other kinds of prompts."
    )
    trained.update(
        prompts=learned.n_prompts, tried=learned.n_mismatches, harmful=learned.n_harmful, lost_share=lost_share,
        held_out=for_json([held, *learned.others]),
    )  # fmt: skip
    content = json.dumps(judge_as_dict(learned.judge, trained), indent=1, ensure_ascii=False)
    write_atomically(output, content + "\n")
    note(f"Written to {output}\nTo use it: --gate judge:{output}")


def _cells(learned: Learned) -> tuple[list[str], list[list[str]]]:
    head = ["gate", "threshold", "accepts", "harmful tokens per answer"]
    rows = [learned.held, *learned.others]
    return head, [[one.name, f"{one.least:.3g}", f"{one.accepted:.0%}", f"{one.lost:.3g}"] for one in rows]
