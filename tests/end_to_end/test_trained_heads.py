"""A head trained from the target's GGUF file and texts: it drafts, the run resumes, and mistakes are one sentence."""

from __future__ import annotations

import json
import random
from contextlib import closing

import numpy as np
import pytest

from pyfly_cpp import Eagle3, FlyLlama
from pyfly_cpp.decoding.companions import companions
from pyfly_cpp.errors import IncompatibleDraftError
from pyfly_cpp.evaluation.files import DataError
from pyfly_cpp.heads import plan_head, train_head
from pyfly_cpp.heads.prompts import built_in
from pyfly_cpp.heads.states import read_states, row_type, write_states
from pyfly_cpp.heads.texts import Text
from pyfly_cpp.machine.files import OutputError

ONE = {"n_threads": 1, "n_threads_batch": 1}
QUIET = {"n_ctx": 512, "verbose": False, **ONE}


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def texts(tmp_path):
    """Questions of one pattern, which the head of a tiny model can learn."""
    rng = random.Random(0)
    folder = tmp_path / "texts"
    folder.mkdir()
    names, things = ("Anna", "Ben", "Carl", "Dora"), ("apples", "books", "cars", "dogs")
    lines = []
    for _ in range(160):
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        name, thing = rng.choice(names), rng.choice(things)
        lines.append(f"Question: {name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?")
        lines.append(f"Answer: {name} has {a} + {b} = {a + b} {thing}.\n#### {a + b}\n")
    (folder / "sums.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_prompts_are_many_and_of_all_kinds():
    kinds = {kind: list(prompts) for kind, prompts in built_in().items()}
    assert set(kinds) == {"code", "maths", "explain", "story", "instruct"}
    for prompts in kinds.values():
        assert len(set(prompts)) == len(prompts) >= 200
        assert not any("{" in prompt for prompt in prompts)


def test_states_are_those_of_the_target_and_are_resumed(tiny_target, tmp_path):
    path = tmp_path / "states.bin"
    with closing(FlyLlama(tiny_target, logits_all=True, **QUIET)) as llm:
        tokens = llm.tokenize(b"Question: Anna has 3 apples and buys 2 more. How many are there?", add_bos=False)
        written = [Text("a", 0, tokens), Text("b", 0, tokens[:7])]
        never = float("inf")
        assert write_states(path, llm, written[:1], (1, 3, 5), never, lambda *_: None) == 1
        with path.open("ab") as file:  # a killed run
            file.write(b"half a row")
        assert write_states(path, llm, written, (1, 3, 5), never, lambda *_: None) == 2
        llm.eval(tokens)
        logits = np.array(llm.scores[: len(tokens)], dtype=np.float64)
    rows = read_states(path, 3 * 256)
    assert rows.dtype == row_type(3 * 256)
    assert rows["token"].tolist() == [*tokens, *tokens[:7]]
    assert np.array_equal(rows["ids"][: len(tokens), 0], logits.argmax(-1))
    log_probs = logits.max(-1) - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) - logits.max(-1)
    assert np.allclose(rows["log_probs"][: len(tokens), 0], log_probs, atol=1e-2)
    again = rows["inputs"][len(tokens) :].astype(np.float32)
    assert np.allclose(again, rows["inputs"][:7].astype(np.float32), atol=2e-2)


@pytest.mark.slow
def test_a_head_is_trained_found_and_drafts(torch, tiny_target, texts, tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    target = folder / "target.gguf"
    target.symlink_to(tiny_target)
    plan = plan_head(target, folder / "head.gguf", texts=texts, n_tokens=6000, hours=0.5, kind="f16", licence="MIT")
    said = []
    found = train_head(plan, log=said.append, measure=False, **ONE)
    assert len(said) <= 8
    assert found.acceptance[0] > 0.6  # the linear map alone: under 0.4
    found_again = train_head(plan, log=said.append, measure=False, **ONE)  # nothing is left to do
    assert found_again == found
    beside = next(companions(target))
    assert (beside.path, type(beside.drafter)) == (folder / "head.gguf", Eagle3)
    prompt = "Question: Dora has 4 books and buys 5 more. How many books does Dora have?"
    answers = []
    for drafter in (None, Eagle3(plan.output, draft_max=3)):
        with closing(FlyLlama(target, drafter=drafter, **QUIET)) as llm:
            answers.append(llm(prompt, max_tokens=48, temperature=0)["choices"])
            stats = llm.stats
    assert answers[0] == answers[1]
    assert stats.matched / stats.drafted > 0.05


@pytest.mark.slow
def test_a_target_writes_its_own_texts_and_a_killed_training_is_planned_again(
    torch, tiny_target, tmp_path, monkeypatch
):
    """The first run is killed when the head is the linear map: there is an output, and no checkpoint yet."""
    out, options = tmp_path / "head.gguf", {"n_tokens": 4000, "hours": 0.2}

    def killed(*_):
        raise KeyboardInterrupt

    plan = plan_head(tiny_target, out, **options)
    with monkeypatch.context() as patched:
        patched.setattr("pyfly_cpp.heads.fit.Fit.learn", killed)
        with pytest.raises(KeyboardInterrupt):
            train_head(plan, **ONE)
    written = Text.read(plan.folder / "texts.jsonl")
    assert sum(len(text.tokens) for text in written) >= 4000
    assert {text.kind for text in written} == set(built_in()) and all(text.n_prompt > 0 for text in written)
    with closing(FlyLlama(tiny_target, drafter=Eagle3(out), **QUIET)) as llm:
        assert llm("Question: Dora has 4 books", max_tokens=4)["choices"]
    found = train_head(plan_head(tiny_target, out, **options), **ONE)
    assert Text.read(plan.folder / "texts.jsonl") == written
    assert found.acceptance[0] > 0.55
    assert found.speeds is not None and all(speed > 0 for speed in found.speeds)
    (tmp_path / "mine.gguf").write_text("of another kind", encoding="utf-8")
    with pytest.raises(OutputError, match=r"mine\.gguf exists"):
        plan_head(tiny_target, tmp_path / "mine.gguf", **options)


def test_what_is_wrong_is_said_before_any_work(torch, tiny_target, texts, tmp_path):
    out = tmp_path / "head.gguf"
    with pytest.raises(ValueError, match="at least 2000 tokens"):
        plan_head(tiny_target, out, n_tokens=10)
    with pytest.raises(ValueError, match="type 'q3' is unknown"):
        plan_head(tiny_target, out, kind="q3")
    with pytest.raises(DataError, match="is not there"):
        plan_head(tiny_target, out, texts=tmp_path / "none")
    (tmp_path / "no").write_text("no model", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        plan_head(tmp_path / "no", out)
    short = tmp_path / "short"
    short.mkdir()
    (short / "a.txt").write_text("Ten tokens are too few to learn from.", encoding="utf-8")
    with pytest.raises(DataError, match="a head needs at least 2000"):
        train_head(plan_head(tiny_target, out, texts=short), measure=False, **ONE)
    (tmp_path / "head.gguf.work" / "made_from.json").write_text(json.dumps({}), encoding="utf-8")
    with pytest.raises(DataError, match="another target or other texts"):
        train_head(plan_head(tiny_target, out, texts=texts), measure=False, **ONE)


def test_layers_that_cannot_be_read_are_refused(tiny_target):
    with closing(FlyLlama(tiny_target, **QUIET)) as llm, pytest.raises(IncompatibleDraftError):
        llm.decoder.target.states((1, 3, 6), [1, 2, 3], 4, 256)
