"""`pyfly-cpp demo`: both sides of the comparison begin as a new process does."""

from __future__ import annotations

import re
from contextlib import closing

import pytest

from pyfly_cpp import DraftModel, FlyLlama, PromptLookup
from pyfly_cpp.cli import demo, measuring
from pyfly_cpp.cli.demo import PROMPT, answer
from pyfly_cpp.decoding import EXACT, PLAIN

from .conftest import DRAFT, TARGET

OPTIONS = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.mark.parametrize("drafter", [PromptLookup(), (PromptLookup(), DraftModel(str(DRAFT)))])
def test_an_answer_knows_nothing_of_earlier_ones(drafter):
    """Prompt lookup remembers answers, and drafted the same answer from its first."""
    with closing(FlyLlama(TARGET, drafter=drafter, adaptive=False, **OPTIONS)) as llm:
        messages = [{"role": "user", "content": PROMPT}]
        text = llm.create_chat_completion(messages, max_tokens=80, temperature=0)["choices"][0]["message"]["content"]
        n_steps = llm.stats.rounds
        plain, slow = answer(llm, PLAIN, None, 80)
        assert (plain, slow.rounds, slow.drafted) == (text, slow.committed, 0)
        for _ in range(2):
            drafted, fast = answer(llm, EXACT.but(adaptive=False), drafter, 80)
            assert (drafted, fast.rounds) == (text, n_steps)
        assert n_steps < slow.rounds


def test_the_demo_shows_the_steps_of_a_new_process(run, smollm2):
    """The governor decides by measured times, so that steps differ; with a remembered answer there are a tenth."""
    arguments = ["-t", 1, "-c", 1024, "-m", smollm2, "--drafter", "lookup"]
    shown = run("demo", *arguments)
    steps = [int(n) for n in re.findall(r" in (\d+) steps", shown.err)]
    complete = run("complete", "--stats", "--temp", 0, *arguments, PROMPT)
    fresh = int(re.search(r" in (\d+) steps", complete.err)[1])
    plain, drafted = steps
    assert plain / 6 < fresh <= plain and plain / 6 < drafted <= plain


def test_the_demo_model_can_do_the_task(smollm2):
    with closing(FlyLlama(smollm2, **OPTIONS)) as llm:
        text, stats = answer(llm, PLAIN, None, 200)
        assert text.strip() == PROMPT.split("\n\n")[1].strip().replace("a kilo", "a pound")
        assert stats.committed < 200  # ends by itself


def test_the_demo_takes_turns_and_warns_on_a_busy_machine(run, monkeypatch):
    monkeypatch.setattr(measuring, "disturbance", lambda machine: "other programs were using 1.7 of 2 cores.")
    orders = []

    def counted(llm, setting, *more, **options):
        orders.append(setting.is_plain)
        return answer(llm, setting, *more, **options)

    monkeypatch.setattr(demo, "answer", counted)
    result = run("demo", TARGET, "-t", 1, "-n", 40, "--n-ctx", 1024)
    assert result.code == 0 and "1.7 of 2 cores" in result.err
    warm_up, *turns = orders
    assert warm_up and turns == [True, False] * 3
    assert re.findall("--- (.*) ---", result.err) == ["prompt", "without drafts", "with drafts"]
    assert result.out.rstrip().splitlines()[-1].startswith(("Both texts are the same", "The texts differ"))
    monkeypatch.setattr(demo, "_MOST_SECONDS", 0.0)
    orders.clear()
    assert run("demo", TARGET, "-t", 1, "-n", 20, "--n-ctx", 1024).code == 0 and len(orders) == 3
    refused = run("demo", TARGET, "--drafter", "none")
    assert refused.code == 2 and "needs a drafter" in refused.err
