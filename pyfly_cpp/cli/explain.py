"""`pyfly-cpp explain`: an answer as a page to look at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from pyfly_cpp.cli import if_interrupted
from pyfly_cpp.cli.headings import HeadedCommand, declares, number, sampling
from pyfly_cpp.cli.hints import one_prompt
from pyfly_cpp.cli.kinds import FILE, SEED, Int
from pyfly_cpp.cli.loading import Models, model_options, reading
from pyfly_cpp.cli.measuring import open_session
from pyfly_cpp.cli.options import TEMPERATURE_OPTION
from pyfly_cpp.cli.terminal import AnswerWriter, note
from pyfly_cpp.cli.text import TEXT
from pyfly_cpp.decoding import Decoding
from pyfly_cpp.machine.files import require_free, write_atomically
from pyfly_cpp.measure.token_page import make_page, render

HELP = """Answer PROMPT and write an HTML page that shows how each token was produced.

\b
Example:
  pyfly-cpp explain "Why is the sky blue?" -m target.gguf \\
      -d draft.gguf --gate margin:0.3 -o sky.html

Every token is coloured by how it was accepted; hovering over it shows entropy, margin and the target's choice. Rejected
drafts are struck through. The page is one file, without scripts, and loads nothing."""


_OPTIONS = [
    click.option("-s", "--setting", "--gate", "setting_text", metavar="TEXT",
                 help="How to decode: a gate, and other words of a setting. The governor drafts as in chat, unless "
                 "k=N or no-adaptive is among them.  [default: the preset's, or exact]"),
    click.option("--system", type=TEXT, metavar="TEXT", help="System prompt."),
    number("-n", "--max-tokens", kind=Int(1), default=256, help="Maximum answer length in tokens."),
    TEMPERATURE_OPTION,
    number("--seed", declare=sampling, kind=SEED, default=0, help="Seed for sampling."),
    click.option("-o", "--output", default="explain.html", type=FILE, help="The page to write."),
    click.option("--force", is_flag=True, help="Overwrite an existing file."),
]  # fmt: skip


@click.command("explain", cls=HeadedCommand, help=HELP)
@click.argument("prompt", metavar="PROMPT", nargs=-1, required=True, type=TEXT, callback=one_prompt)
@declares(_OPTIONS)
@model_options
def command(
    prompt: str,
    setting_text: str | None,
    system: str | None,
    max_tokens: int,
    temperature: float,
    seed: int,
    output: str,
    force: bool,
    models: Models,
) -> None:
    if_interrupted("Nothing was written.")
    setting = _as_in_chat(Decoding.parse(setting_text) if setting_text else models.setting().canonical())
    if not prompt.strip():
        raise ValueError("the prompt is empty; give a text.")
    require_free(output, force)
    generator = open_session(models, [setting], outputs=[output]).generator
    llm = generator.llm
    llm.trace = True
    messages = [{"role": "system", "content": system}] if system else []
    rendered = generator.render([*messages, {"role": "user", "content": prompt}])
    with reading(llm):
        generated = generator.generate(rendered, setting, max_tokens, temperature, seed)

    def detokenize(tokens: list[int]) -> bytes:
        return bytes(llm.detokenize(tokens, special=True))

    drafter = " and ".join(map(str, generator.drafters.of(setting).drafters))
    page = make_page(generated, detokenize, llm.vocabulary.is_control, prompt, setting, models.model, drafter)
    answer = AnswerWriter()
    answer.write(generated.text + "\n")
    note(generated.stats.summary())
    write_atomically(output, render(page))
    note(f"Written to {Path(output)}")


def _as_in_chat(setting: Decoding) -> Decoding:
    """With the governor, unless the setting decides that, or its draft length does."""
    is_open = setting.adaptive is None and setting.draft_max is None and not setting.is_plain
    return replace(setting, adaptive=True) if is_open else setting
