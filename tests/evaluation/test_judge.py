"""Training a `Judge`: mining, fitting, and when it is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from click_runner import click_runner

from pyfly_cpp import DraftModel, FlyLlama
from pyfly_cpp.bench import judge as judging
from pyfly_cpp.bench.judge import MiningFile, fit, hold, learn, mine
from pyfly_cpp.bench.prompts import BenchPrompt
from pyfly_cpp.decoding import EXACT
from pyfly_cpp.decoding.gates import FEATURES, Judge
from pyfly_cpp.machine.files import OutputError

PROMPTS = [BenchPrompt(f"p{i}", "", (f"Tell me a story about {i} cats.",), "the" if i % 2 else "") for i in range(5)]
IDENTITY = {"max_tokens": 24}


def synthetic(n_prompts=40, n_each=10, seed=0):
    """Mismatches that are harmless where margin and divergence together are small."""
    rng = np.random.default_rng(seed)
    mined = []
    for i in range(n_prompts):
        x = np.zeros((n_each, len(FEATURES)))
        x[:, FEATURES.index("margin")], x[:, FEATURES.index("kl")] = rng.uniform(0, 2, (2, n_each))
        x[:, FEATURES.index("top")] = -1.0
        good = 4 - 3 * x.sum(axis=1) + rng.logistic(size=n_each) * 0.3 > 0
        rows = [[*values, bool(label)] for values, label in zip(x.tolist(), good)]
        mined.append({"key": f"k{i}", "prompt": f"p{i}", "checked": "answer", "mismatches": 2 * n_each, "rows": rows})
    return mined


def test_a_fit_is_the_minimum_of_its_loss():
    rng = np.random.default_rng(1)
    x = np.column_stack([rng.normal(size=(300, 3)) * [1, 100, 0.01] + [5, 0, 0], np.full(300, 7.0)])
    y = (rng.random(300) < 1 / (1 + np.exp(-(x[:, 0] - 5 + x[:, 1] / 100)))).astype(float)
    counts = rng.uniform(0.5, 2, 300)
    *weights, bias = fit(x, y, counts)
    assert weights[3] == 0.0, "a column that is always the same"
    p = 1 / (1 + np.exp(-(x @ weights + bias)))
    scale = x.std(axis=0)[:3]
    gradient = (counts * (p - y)) @ ((x[:, :3] - x[:, :3].mean(axis=0)) / scale) + np.array(weights[:3]) * scale
    assert np.abs(gradient).max() < 1e-6
    separable = np.linspace(-1, 1, 20)[:, None]
    assert np.isfinite(fit(separable, (separable[:, 0] > 0).astype(float), np.ones(20), penalty=1e-3)).all()


def test_the_lowest_threshold_within_a_loss():
    scores = np.array([3.0, 2, 2, 1, -np.inf])
    harmful, counts = np.array([0.0, 1, 0, 0, 0]), np.array([1.0, 2, 1, 4, 2])
    found = hold("x", scores, harmful, counts, 10, 0.2)
    assert (found.least, found.accepted, found.lost) == (1.0, 0.8, 0.2), "what is -inf is never accepted"
    found = hold("x", scores, harmful, counts, 10, 0.1)
    assert (found.least, found.accepted, found.lost) == (3.0, 0.1, 0.0), "two that score alike are one"
    assert hold("x", scores[1:2], harmful[1:2], counts[1:2], 10, 0.1) is None


def test_what_is_learned_beats_what_looks_at_one_number():
    learned = learn(synthetic(), 0.2, "j.json")
    assert learned.held.lost <= 0.2
    assert {other.name.split()[0] for other in learned.others} <= {"margin", "entropy", "kl"}
    assert learned.held.accepted > 1.5 * max(other.accepted for other in learned.others)
    weights = dict(learned.judge.weights)
    assert set(weights) == {"margin", "kl"} and max(weights.values()) < 0, "what never changes has no weight"
    assert learn(synthetic(), 0.5, "j.json").judge.threshold < learned.judge.threshold


@pytest.mark.parametrize(
    ("mined", "named"),
    [
        (synthetic(4), "4 prompts are too few.* at least 5"),
        ([{**one, "rows": [[*row[:-1], True] for row in one["rows"]]} for one in synthetic()], "are harmless"),
        ([{**one, "rows": [[*row[:-1], False] for row in one["rows"]]} for one in synthetic()], "are harmful"),
        ([{**one, "rows": []} for one in synthetic()], "all 0 mismatches"),
        # no threshold accepts a number of which nothing is known
        (
            [{**one, "rows": [[0.0] * 13 + [i % 2] for i in range(9)]} for one in synthetic()],
            "accepts none of 360 .*--lost-share",
        ),
        # the margin says it all
        (
            [{**one, "rows": [[*row[:-1], row[0] < 1] for row in one["rows"]]} for one in synthetic(seed=1)],
            "the judge accepts [0-9]+% of 400 mismatches of 40 prompts, and margin:[0-9.]+ [0-9]+%",
        ),
    ],
    ids=["few", "harmless", "harmful", "none", "unknown", "margin"],
)
def test_what_is_refused(mined, named):
    with pytest.raises(ValueError, match=named):
        learn(mined, 0.05, "j.json")


def mined_by(generator, path, prompts=PROMPTS, progress=lambda done, n: None):
    file = MiningFile(path, IDENTITY)
    mine(generator, prompts, file, 24, 4, progress)
    return file.mined(prompts)


def test_mining_and_resuming(generators, tmp_path):
    generator = generators[1]
    whole = mined_by(generator, tmp_path / "whole.jsonl")
    assert [one["checked"] for one in whole] == ["likelihood", "answer"] * 2 + ["likelihood"]
    rows = [row for one in whole for row in one["rows"]]
    assert all(len(one["rows"]) == min(4, one["mismatches"]) for one in whole) and len(rows) > 10
    assert all(len(row) == len(FEATURES) + 1 and np.isfinite(row).all() and isinstance(row[-1], bool) for row in rows)

    class StopError(Exception):
        pass

    def stop(done, n):
        raise StopError

    with pytest.raises(StopError):
        mined_by(generator, tmp_path / "resumed.jsonl", progress=stop)
    done = (tmp_path / "resumed.jsonl").read_text()
    assert len(done.splitlines()) == 1 + generator.n_parallel
    (tmp_path / "resumed.jsonl").write_text(done + '{"key": "cut')
    resumed = mined_by(generator, tmp_path / "resumed.jsonl")
    assert [{**one, "rows": None} for one in resumed] == [{**one, "rows": None} for one in whole]
    np.testing.assert_allclose([row for one in resumed for row in one["rows"]], rows, atol=1e-3)
    assert (tmp_path / "resumed.jsonl").read_text().startswith(done)
    with pytest.raises(OutputError, match=r"mismatches that were mined, with other max_tokens; choose another --mined"):
        MiningFile(tmp_path / "whole.jsonl", {"max_tokens": 3})


def test_mined_answers_are_exact_and_their_features_those_of_the_records(generators):
    generator = generators[1]
    turns = [dataclasses.replace(PROMPTS[0], turns=(*PROMPTS[0].turns, "And dogs?")), PROMPTS[1]]
    answers = judging._answers(generator, turns, 24)
    generator.llm.trace = False
    for prompt, answer in answers:
        assert answer.tokens == generator.generate(prompt, EXACT, 24).tokens
        seen = [record for record in answer.records if record.features]
        assert seen and {record.reason for record in seen} <= {"gate", "safety"}
        for record in seen:
            values = dict(zip(FEATURES, record.features))
            assert values["margin"] == min(record.margin, 20) and values["entropy"] == record.entropy
            assert values["answered"] == pytest.approx(np.log1p(record.position - len(prompt.tokens)))
    assert len(answers[0][0].tokens) > 2 * len(answers[1][0].tokens), "the last turn"


def test_the_targets_own_token_changes_no_likelihood(generators, monkeypatch):
    generator = generators[1]
    ((prompt, answer),) = judging._answers(generator, PROMPTS[:1], 24)
    generator.llm.trace = False
    at = next(i for i, record in enumerate(answer.records) if record.rejected and i < 12)
    drafted = judging._Mismatch(answer, prompt, at)
    record = dataclasses.replace(answer.records[at], rejected=(answer.tokens[at],))
    own = drafted._replace(
        exact=dataclasses.replace(answer, records=(*answer.records[:at], record, *answer.records[at + 1 :]))
    )
    monkeypatch.setattr(judging, "DROP", 1e-3)
    assert judging._stay_likely(generator, [own, drafted]) == {id(own): True, id(drafted): False}


def test_a_drafter_without_distributions(generators, tmp_path, monkeypatch):
    from pyfly_cpp import PromptLookup
    from pyfly_cpp.decoding.drafting import Drafters

    generator = generators[1]
    monkeypatch.setattr(generator, "drafters", Drafters((PromptLookup(),)))
    mined = mined_by(generator, tmp_path / "m.jsonl", [BenchPrompt("a", "", ("a b c a b c a b d",)), *PROMPTS[:2]])
    rows = np.array([row[:-1] for one in mined for row in one["rows"]])
    assert len(rows) and not rows[:, [FEATURES.index(name) for name in ("draft", "draft_rank", "kl")]].any()


def test_tune_judge(model_arguments, tmp_path, tiny):
    from pyfly_cpp.cli import cli

    def run(*arguments):
        return click_runner().invoke(cli, [*map(str, arguments), *model_arguments])

    prompts, output = tmp_path / "p.jsonl", tmp_path / "j.json"
    prompts.write_text("".join(json.dumps({"prompt": one.turns[0], "answer": one.answer}) + "\n" for one in PROMPTS))
    command = ["tune", "--judge", output, "--prompts", prompts, "-n", 16, "--mismatches", 2]
    result = run(*command, "--lost-share", 0)
    assert "5 answers and at most 10 continuations" in result.stderr
    assert result.exit_code == 1 and not output.exists(), result.output
    assert "so nothing was written" in result.stderr or "nothing to learn" in result.stderr
    mined = tmp_path / "j.json.mined.jsonl"
    first, *lines = mined.read_text().splitlines()
    rows = [{**made, "key": json.loads(line)["key"]} for line, made in zip(lines, synthetic(5, 80))]
    mined.write_text("\n".join([first, *map(json.dumps, rows)]) + "\n")
    result = run(*command, "--lost-share", 1)
    assert result.exit_code == 0 and "continuations" not in result.stderr, "a second fit mines nothing"
    assert "accepts" in result.stdout and "judge" in result.stdout and "margin" in result.stdout
    content = json.loads(output.read_text())
    assert content["trained"]["prompts"] == 5 and content["trained"]["model"]["sha256"]
    assert "exists already; choose another name, or overwrite it with --force" in run(*command).stderr
    target, draft = map(str, tiny)
    options = {"n_ctx": 512, "n_threads": 1, "verbose": False, "draft_max": 8, "drafter": DraftModel(draft)}
    llm = FlyLlama(target, gate=f"judge:{output}", **options)
    assert llm.gate == Judge(str(output))
    llm.create_completion(PROMPTS[0].turns[0], max_tokens=64, temperature=0)
    assert llm.stats.loose_accepted > 0 and llm.stats.rejected_gate > 0
    llm.close()
