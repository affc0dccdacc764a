"""`pyfly-cpp tune`: the fastest setting within a budget, as a preset."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
from pathlib import Path
from typing import Any

import click

from pyfly_cpp.bench import report
from pyfly_cpp.bench import tune as tuning
from pyfly_cpp.bench.measure import summarise
from pyfly_cpp.bench.prompts import pick_prompts, read_prompts
from pyfly_cpp.cli import if_interrupted
from pyfly_cpp.cli.headings import HeadedCommand, declares, number
from pyfly_cpp.cli.kinds import Int, Real, Written
from pyfly_cpp.cli.loading import MODEL_ARGUMENT, Models, model_options
from pyfly_cpp.cli.measuring import open_session, require_outputs, show_table
from pyfly_cpp.cli.options import SAMPLING_OPTIONS
from pyfly_cpp.cli.progress import progress_bar
from pyfly_cpp.cli.terminal import note, write, write_sentences
from pyfly_cpp.decoding import PLAIN, Decoding
from pyfly_cpp.decoding.drafters import as_given
from pyfly_cpp.decoding.drafting import AUTO, Drafters
from pyfly_cpp.decoding.gates import ladder
from pyfly_cpp.decoding.presets import Preset, save_preset
from pyfly_cpp.evaluation.generation import Sampling
from pyfly_cpp.evaluation.report import interval
from pyfly_cpp.evaluation.statistics import for_json
from pyfly_cpp.machine.files import write_atomically
from pyfly_cpp.models.named import model_file

HELP = """Find the gate, threshold, window, K and drafter with the highest speed whose outputs stay close to exact ones.

\b
Example:
  pyfly-cpp tune -m target.gguf -d draft.gguf --prompts mine.jsonl \\
      --agreement 0.8 -o mine.preset.json

Give 8 to 16 prompts of the kind you will use: a .txt file with one on each line, or JSONL with `prompt` or `turns`, and
optionally `answer` (a string that a right output contains). Agreement is the share of tokens that an output has in
common with the exact one, in order. Different wording lowers it, and so does a --temperature soon after the first
difference: then judge by answers, and lower --agreement. A lossy setting is written only if it is clearly faster than
the best lossless one when both are measured again. All available drafters are tried (the model's MTP head, --draft,
prompt lookup), or the one that --drafter names. The threshold of each --gate starts at exact decoding and is loosened
step by step, until outputs stray further than allowed or the speed is enough. `FlyLlama.from_preset` and --preset read
the file."""


def _with_threshold(word: str) -> str:
    ladder(word)
    return word


_OPTIONS = [
    click.option("--prompts", "prompt_file", required=True, metavar="FILE", help="Prompts of your own: .txt or JSONL."),
    number("--limit", kind=Int(1), default=16, help="Take at most N of them."),
    number("--agreement", kind=Real(0, 1), default=0.8, help="Least mean agreement."),
    number("--lost-answers", kind=Int(0), default=0, help="Most answers that may be lost."),
    click.option(
        "--gate",
        "gates",
        multiple=True,
        type=Written("gate", _with_threshold),
        metavar="WORD",
        default=tuning.GATES,
        help="A gate to try, such as typical or fuzzy-js; can be repeated.",
    ),
    number("--until-speed", kind=Real(1), help="Loosen no further at X times the speed of exact."),
    number("-n", "--max-tokens", kind=Int(2), default=128, help="Longest answer in tokens."),
    *SAMPLING_OPTIONS,
    click.option("-o", "--output", default="pyfly-preset.json", metavar="FILE", help="The preset to write."),
    click.option(
        "--plot",
        "plot_file",
        metavar="FILE",
        help="Write the frontier as a PNG (needs matplotlib).",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print everything that was measured as JSON."),
    click.option("--force", is_flag=True, help="Overwrite files that exist."),
]


@click.command("tune", cls=HeadedCommand, help=HELP)
@MODEL_ARGUMENT
@declares(_OPTIONS)
@model_options
def command(
    prompt_file: str,
    limit: int,
    agreement: float,
    lost_answers: int,
    gates: tuple[str, ...],
    until_speed: float | None,
    max_tokens: int,
    temperature: float,
    seed: int,
    output: str,
    plot_file: str | None,
    as_json: bool,
    force: bool,
    models: Models,
) -> None:
    if_interrupted("Nothing was written.")
    prompts = pick_prompts(read_prompts(prompt_file), limit)
    require_outputs((output,), force, plot_file)
    drafters, _ = models.choose_drafters()
    words = [models.drafter] if models.drafter != AUTO else drafters.words()
    k = max(setting.draft_max or 0 for setting in tuning.first_settings(words))
    session = open_session(models, [Decoding(drafter=word) for word in words], draft_max=k)
    budget = tuning.Budget(agreement, lost_answers, math.inf if until_speed is None else until_speed)
    sampling = Sampling(temperature, seed)
    with progress_bar(1, "tune") as bar:
        stages: list[str] = []

        def progress(stage: str, done: int, n: int, what: str) -> None:
            if stage not in stages:
                stages.append(stage)
                bar.tell(f"Stage {stage}: {n} generations")
            bar(done, what, n)

        tuned = tuning.tune(session.generator, prompts, budget, max_tokens, words, progress, sampling, gates)
    fresh = summarise(tuned.confirmation)
    chosen = next(s for s in fresh if s.setting == str(tuned.chosen.setting))
    claim = claim_sentence(tuned, interval(chosen.speedup_exact), interval(chosen.speedup_plain), prompt_file)
    claim += f" Sampling: {sampling.described(len(prompts))}."
    preset = make_preset(tuned.chosen.setting, models.model, session.generator.drafters)
    facts = {
        "sentence": claim,
        "n_prompts": tuned.n_prompts,
        "budget": {"agreement": agreement, "lost_answers": lost_answers, "until_speed": until_speed},
        "gates": list(gates),
        **dataclasses.asdict(sampling),
        "measured": tuned.chosen.as_dict(),
        "confirmed": for_json(chosen),
        "machine": session.machine,
        "models": session.models,
    }
    preset = dataclasses.replace(preset, claim=facts)
    if as_json:
        record = {"format": 1, **facts, "candidates": [c.as_dict() for c in tuned.candidates]}
        record["confirmation"] = [m.as_dict() for m in tuned.confirmation]
        write(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    else:
        show_table("", *candidate_cells(tuned, budget))
        show_table("The choice, measured again", *report.speed_cells(fresh))
        write_sentences(claim)
    if plot_file:
        write_atomically(plot_file, report.plot_frontier(tuned, budget))
    save_preset(preset, output, force)
    note(f"Written to {output}\nTo use it:\n  pyfly-cpp chat --preset {shlex.quote(output)}")


def candidate_cells(tuned: tuning.Tuned, budget: tuning.Budget) -> report.Cells:
    """All candidates, fastest first; `*` on the frontier."""
    on_frontier = {c.setting for c in tuning.frontier(tuned.candidates)}
    head = ["", "setting", "x exact [95% CI]", "agreement [95% CI]", "answers", "within the budget"]
    body = []
    for c in sorted(tuned.candidates, key=lambda c: -c.speedup.estimate):
        mark = "chosen" if c.setting == tuned.chosen.setting else "*" if c.setting in on_frontier else ""
        answers = f"{c.n_answered}/{c.n_answers}, {c.n_lost} lost" if c.n_answers else "–"
        is_within = "yes" if c.within(budget) else "no"
        body.append([mark, str(c.setting), interval(c.speedup), interval(c.agreement), answers, is_within])
    if not any(c.n_answers for c in tuned.candidates):
        head, body = [*head[:4], head[5]], [[*row[:4], row[5]] for row in body]
    return head, body


def claim_sentence(tuned: tuning.Tuned, over_exact: str, over_plain: str, prompt_file: str) -> str:
    """The claim, and its evidence."""
    c = tuned.chosen
    rejected = rejection_sentence(tuned)
    if c.setting.is_plain:
        among = "lossless settings" if rejected else f"{len(tuned.candidates)} settings within the budget"
        return rejected + (
            f"Plain decoding is the fastest of the {among} on {tuned.n_prompts} prompts of {Path(prompt_file).name}. "
            "With this model, draft and machine, drafting is not faster."
        )
    return rejected + (
        f"{c.setting} is the best of {len(tuned.candidates)} settings on {tuned.n_prompts} prompts of "
        f"{Path(prompt_file).name}: {over_exact} times the speed of exact and {over_plain} times that of plain, with "
        f"an agreement with exact of {interval(c.agreement)}. It was chosen on these very prompts, so expect slightly "
        "less speed and agreement on similar ones. Nothing is known about other kinds."
    )


def rejection_sentence(tuned: tuning.Tuned) -> str:
    """Why the choice is not the best setting of the search, with a space behind it; empty if it is."""
    if tuned.chosen == tuned.fastest:
        return ""
    was = f"{tuned.fastest.setting} was the best setting in the search. Measured again, "
    if not tuned.keeps_budget:
        return f"{was}its outputs strayed further than allowed, so the preset is lossless. "
    if tuned.over_lossless is None or tuned.over_lossless.low > 1:
        return f"{was}it was not faster than plain decoding. "
    return (
        f"{was}its speed was {interval(tuned.over_lossless)} times that of the best lossless one. That is not clearly "
        "more, so the preset is lossless. "
    )


def make_preset(setting: Decoding, model: str | os.PathLike[str], drafters: Drafters) -> Preset:
    """The preset of a setting, with the models it was measured with."""
    model = os.path.abspath(model)
    if setting.is_plain:
        return Preset(dataclasses.replace(PLAIN, draft_max=0), model)
    parts = [_with_whole_paths(part) for part in drafters.parts_of(setting)]
    # What was measured, whatever a gate's own may be one day; a lossless one has no use for it.
    window = None if setting.gate.is_lossless else setting.effective_window
    return Preset(Decoding(setting.gate, window, setting.draft_max, as_given(parts), setting.adaptive), model)


def _with_whole_paths(part: Any) -> Any:
    """A drafter whose files are found from any folder."""
    given = {name: getattr(part, name) for name in part.path_fields}
    if part.file is not None:
        given[part.file_field] = model_file(part.file)
    paths = {
        name: tuple(map(os.path.abspath, value)) if isinstance(value, tuple) else os.path.abspath(value)
        for name, value in given.items()
        if value
    }
    return part.but(**paths) if paths else part
