"""A head trained from the target's GGUF file and texts: it drafts, the run resumes, and mistakes are one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from gguf_edit import edit_gguf, other_token

from pyfly_cpp import DraftModel, Eagle3, FlyLlama
from pyfly_cpp.decoding.companions import companions
from pyfly_cpp.errors import IncompatibleDraftError, NotFiniteError
from pyfly_cpp.heads import built_in_prompts as prompt_parts
from pyfly_cpp.heads import plan_head, train_head
from pyfly_cpp.heads.asking import LENGTHS, _numbered, ask_for_prompts, read_asked
from pyfly_cpp.heads.built_in_prompts import built_in
from pyfly_cpp.heads.state_file import read_states, row_type, write_states
from pyfly_cpp.heads.target import TargetFile
from pyfly_cpp.heads.texts import Text, texts_of_files, write_answers
from pyfly_cpp.machine.files import OutputError
from pyfly_cpp.machine.rows import DataError, read_lines_so_far

CURVE = Path(__file__).parents[2] / "benchmarks" / "learning_curve.py"
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


@contextlib.contextmanager
def full_disk(n_bytes):
    """A disk on which no file grows beyond so many bytes."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def damaged(tiny_target, tmp_path):
    """The tiny target, whose embedding of token 100 is not a number."""

    def damage(arrays):
        arrays["token_embd.weight"][100] = np.nan

    return edit_gguf(tiny_target, tmp_path / "damaged.gguf", tensors=damage)


def test_prompts_are_many_and_of_all_kinds():
    kinds = {kind: list(prompts) for kind, prompts in built_in().items()}
    assert set(kinds) == {"code", "maths", "explain", "story", "instruct"}
    for prompts in kinds.values():
        assert len(set(prompts)) == len(prompts) >= 200
        assert not any("{" in prompt for prompt in prompts)
    for kind, topics in (("code", prompt_parts._TASKS), ("explain", prompt_parts._SUBJECTS)):
        first = kinds[kind][:30]  # a short training has seen most of them
        assert sum(any(topic in prompt for prompt in first) for topic in topics) > 20


def test_a_target_makes_up_prompts(smollm2, tmp_path, monkeypatch):
    monkeypatch.setattr("pyfly_cpp.heads.asking.N_ASKED", 120)
    path, n = tmp_path / "prompts.jsonl", 3
    ask_for_prompts(Path(smollm2), path, n, float("inf"), lambda *_: None, **ONE)
    first = read_asked(path)
    assert len(first) >= n and all(len(prompt) in LENGTHS and "\n" not in prompt for prompt in first)
    ask_for_prompts(Path(smollm2), path, len(first), float("inf"), lambda *_: pytest.fail("nothing is wanted"), **ONE)
    with path.open("ab") as file:
        file.write(b'{"request": "a killed proc')
    ask_for_prompts(Path(smollm2), path, len(first) + 1, float("inf"), lambda *_: None, **ONE)
    rows = read_lines_so_far(path)[0]
    assert read_asked(path)[: len(first)] == first and len(read_asked(path)) > len(first)
    assert len({row["request"] for row in rows}) == len(rows)


def test_a_target_that_makes_up_no_prompts_is_not_asked_for_long(tiny_target, tmp_path, monkeypatch):
    for module in ("asking", "texts"):
        monkeypatch.setattr(f"pyfly_cpp.heads.{module}.N_PARALLEL", 3)
    monkeypatch.setattr("pyfly_cpp.heads.asking.N_ASKED", 16)
    path = tmp_path / "prompts.jsonl"
    ask_for_prompts(Path(tiny_target), path, 1000, float("inf"), lambda *_: None, **ONE)
    asked = path.read_bytes()
    assert not read_asked(path) and 3 <= len(read_lines_so_far(path)[0]) < 10
    ask_for_prompts(Path(tiny_target), path, 1000, float("inf"), lambda *_: pytest.fail("it cannot"), **ONE)
    assert path.read_bytes() == asked
    ask_for_prompts(Path(tiny_target), tmp_path / "late.jsonl", 1000, 0, lambda *_: pytest.fail("it is late"), **ONE)


def test_prompts_are_the_numbered_lines():
    lines = [
        "Sure, here are some:", "1. 1. Why is the sky so blue?", ' 2) "Write a poem about rivers." ', "3. Why?",
        "- What is a river made of?", "4.What is a lake made of?", "**5. Compare two of the rivers.**",
        "6. **Sums**: how are they made?", '7. "Hamlet" and "Macbeth": compare the plays.', "8. **One about rivers:**",
        "9. This one is whole: it ends.",
    ]  # fmt: skip
    found = [
        "Why is the sky so blue?", "Write a poem about rivers.", "Compare two of the rivers.",
        "Sums: how are they made?", '"Hamlet" and "Macbeth": compare the plays.',
    ]  # fmt: skip
    for end, last in (("length", []), ("stop", ["This one is whole: it ends."])):
        for thoughts in (
            "",
            "<think>\n1. I need ten questions about rivers.\n</think>\n",
            "1. I need ten.\n</think>\n",
        ):
            text = thoughts + "\n".join(lines)
            assert _numbered({"message": {"content": text}, "finish_reason": end}) == found + last
    text = "<think>\n1. I need ten questions about rivers.\n2. What are rivers made of?"
    assert _numbered({"message": {"content": text}, "finish_reason": "length"}) == []


def test_prompts_that_the_target_made_up_are_one_kind_of_several(torch, tiny_target, tmp_path, monkeypatch):
    from pyfly_cpp.heads import training

    monkeypatch.setattr("pyfly_cpp.heads.texts.N_ANSWER", 16)
    monkeypatch.setattr("pyfly_cpp.heads.texts.N_PARALLEL", 4)
    (tmp_path / "head.gguf.work").mkdir()
    file = tmp_path / "head.gguf.work" / "prompts.jsonl"
    own = [f"What is there to know about the number {n}?" for n in range(100)]
    row = {"request": "Write questions about numbers.", "prompts": own}
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    asked = []
    monkeypatch.setattr(training, "ask_for_prompts", lambda *given, **_: asked.append(given[2]))

    def texts(n_tokens, **options):
        plan = plan_head(tiny_target, tmp_path / "head.gguf", n_tokens=n_tokens, force=True, **options)
        return training._texts(plan, time.monotonic(), lambda *_: None, {"verbose": False, **ONE})

    first = texts(2000)
    n_own = sum(text.kind == "made up" for text in first)
    assert abs(n_own - len(first) / 6) < 3 and {text.prompt for text in first if text.kind == "made up"} <= set(own)
    file.unlink()  # is made again
    more = texts(4000)
    assert more[: len(first)] == first and len(more) > len(first)
    assert not set(own) & {text.prompt for text in more[len(first) :]}
    assert asked == [2, n_own + -(-(4000 - sum(len(text.tokens) for text in first)) // training.TOKENS_OF_TURN)]
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Count to three."}\n', encoding="utf-8")
    with pytest.raises(DataError, match="answers to other prompts"):
        texts(5000, prompts=tmp_path / "mine.jsonl")


def test_answers_that_are_begun_when_the_time_is_over_are_kept(tiny_target, tmp_path, monkeypatch):
    path, prompts, told = tmp_path / "texts.jsonl", [("a", f"Count to {n}.") for n in range(4)], []
    monkeypatch.setattr("pyfly_cpp.heads.texts.time", SimpleNamespace(monotonic=lambda: len(told)))
    monkeypatch.setattr("pyfly_cpp.heads.texts.wait", lambda *_, **__: SimpleNamespace(done=time.sleep(0.2) or ()))
    monkeypatch.setattr("pyfly_cpp.heads.texts.LEAST_ANSWER", 1)
    write_answers(Path(tiny_target), prompts, path, 10**6, 3, lambda *_: told.append(0), **ONE)
    kept = Text.read(path)
    assert kept and all(0 < text.n_prompt < len(text.tokens) for text in kept)


def test_an_interrupted_run_answers_the_prompts_that_are_left(tiny_target, tmp_path, monkeypatch):
    path, prompts = tmp_path / "texts.jsonl", [("a", f"Count to {n}.") for n in range(12)]
    monkeypatch.setattr("pyfly_cpp.heads.texts.N_PARALLEL", 4)
    for n_tokens in (300, 10**6):  # answers end in another order than they begin
        write_answers(Path(tiny_target), [*prompts, *prompts], path, n_tokens, float("inf"), lambda *_: None, **ONE)
    assert sorted(text.prompt for text in Text.read(path)) == sorted(prompt for _, prompt in prompts)


def test_prompts_without_room_for_an_answer_are_left_out(tiny_target, tmp_path):
    path, prompts = tmp_path / "texts.jsonl", ["Hi.", "word " * 600, "word " * 2000]
    write_answers(Path(tiny_target), [("a", one) for one in prompts], path, 10**6, 9e9, lambda *_: None, **ONE)
    assert [text.prompt for text in Text.read(path)] == ["Hi."]
    rows = [{"prompt": one, "answer": "Hello."} for one in prompts]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with closing(FlyLlama(tiny_target, vocab_only=True, verbose=False)) as llm:
        texts = list(texts_of_files(tmp_path, llm, without=tmp_path / "rows" / ".."))
        assert not texts
        texts = list(texts_of_files(tmp_path / "rows", llm))
    assert len(texts) == 1 and texts[0].n_prompt < len(texts[0].tokens)


def test_a_folder_with_more_files_is_read_on(torch, tiny_target, tmp_path, monkeypatch):
    from pyfly_cpp.heads import training

    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "mnpq":
        (folder / f"{name}.txt").write_text(f"About {name}. " * 2000, encoding="utf-8")
    (folder / "twin.txt").write_text("About m. " * 2000, encoding="utf-8")
    monkeypatch.chdir(folder)
    read = []
    for n_tokens in (8000, 10**6):
        plan = plan_head(tiny_target, "head.gguf", texts=".", n_tokens=n_tokens)  # in the folder that it reads
        plan.folder.mkdir(exist_ok=True)
        training._require_same(plan)
        read.append(training._texts(plan, 0, lambda *_: None, {"verbose": False}))
        (folder / "a.txt").write_text("About a. " * 2000, encoding="utf-8")
        (folder / "b.md").write_text("About b. " * 2000, encoding="utf-8")
    assert len(read[0]) < len(read[1]) and read[1][: len(read[0])] == read[0]
    tokens = [tuple(text.tokens) for text in read[1]]
    assert len(set(tokens)) == len(tokens)
    with closing(FlyLlama(tiny_target, vocab_only=True, verbose=False)) as llm:
        all_texts = "".join(llm.detokenize(text.tokens).decode() for text in read[1])
    assert all(all_texts.count(f"About {name}.") >= 1 for name in "abmnpq") and "made_from" not in all_texts


@pytest.mark.parametrize("change", ["changed", "gone", "more"])
def test_files_that_were_read_must_stay_as_they_are(torch, tiny_target, tmp_path, change):
    from pyfly_cpp.heads import training

    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for file, n in (("a.txt", 800), ("deep/b.txt", 800), ("z.txt", 1)):
        (folder / file).write_text(f"About {file}. " * n, encoding="utf-8")
    plan = plan_head(tiny_target, tmp_path / "head.gguf", texts=folder, n_tokens=2000)
    plan.folder.mkdir()

    def read(plan):
        return training._texts(plan, 0, lambda *_: None, {"verbose": False})

    first = read(dataclasses.replace(plan, n_tokens=2000))
    with (plan.folder / "files.jsonl").open("a", encoding="utf-8") as file:  # a killed run
        file.write('{"file": "z')
    if change == "changed":
        (folder / "deep" / "b.txt").write_text("About b2. " * 800, encoding="utf-8")
    elif change == "gone":
        (folder / "deep" / "b.txt").unlink()
    (folder / "c.txt").write_text("About c. " * 800, encoding="utf-8")
    for n_tokens in (2000, 4000):  # all is read already, or not
        longer = dataclasses.replace(plan, n_tokens=n_tokens)
        if change == "more":
            assert read(longer)[: len(first)] == first
        else:
            with pytest.raises(DataError, match=r"b\.txt"):
                read(longer)
    if change == "more":
        (folder / "c.txt").unlink()
        with pytest.raises(DataError, match=r"c\.txt"):
            read(plan)


def test_texts_of_files_are_read_as_far_as_they_are_wanted(tiny_target, tmp_path):
    (tmp_path / "a.txt").write_text("A b\u00e9 c.\r\n" * 20_000, encoding="utf-8", newline="")
    (tmp_path / "b.md").write_text("\u00e9" * 90_001, encoding="utf-8")  # no line ends
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe" * 100)
    (tmp_path / "e.log").write_bytes(b"A line.\n" * 9000 + b"\xff")  # its first part is text
    if sys.platform == "linux":
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/d.caf\xe9")).write_text("A name that is no UTF-8.\n")
    with closing(FlyLlama(tiny_target, vocab_only=True, verbose=False)) as llm:
        texts = list(texts_of_files(tmp_path, llm))
        kinds = {kind: b"".join(llm.detokenize(t.tokens) for t in texts if t.kind == kind) for kind in ("txt", "md")}
    assert kinds["txt"].decode().count("b\u00e9 c.\n") == 20_000 and kinds["md"].decode().count("\u00e9") == 90_001
    path = tmp_path / "texts.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            text.append(file)
    assert Text.read(path) == texts and {text.kind for text in texts} - {"caf?"} == {"txt", "md", "log"}


def test_few_texts_are_held_out_of_many_kinds(torch):
    from pyfly_cpp.heads.fit import Dataset, spans_of

    rows = np.zeros(1000, row_type(4))
    rows["ids"] = 1
    texts = [Text(str(i // 2), 0, [1, 2]) for i in range(400)] + [Text("many", 0, [1, 2])] * 100
    target = SimpleNamespace(
        n_vocab=8, output_norm=np.ones(4, np.float32), embeddings=lambda ids: np.zeros((len(ids), 4))
    )
    data = Dataset(rows, spans_of(rows, texts), target)
    assert {span.kind for span in data.held_out} == {"other", "many"} and len(data.held_out) == 25 + 7
    few = Dataset(rows, spans_of(rows, [Text("a", 0, [1, 2])] * 5), target)
    assert len(few.held_out) == 1 and few.held_out[0] not in few.training


def test_what_is_held_out_stays_so_if_more_texts_follow(torch):
    from pyfly_cpp.heads.fit import spans_of

    kinds = ["py", "py", "md", "py", "yml", "py", "toml", "md", "py", "txt", "md"] * 30
    texts = [Text(kind, 0, [1] * (1 + i % 3)) for i, kind in enumerate(kinds)]
    rows = np.zeros(sum(len(text.tokens) for text in texts), row_type(4))
    rows["ids"] = 1
    held_out = [span.begin for span in spans_of(rows, texts) if span.is_held_out]
    assert len(texts) / 20 < len(held_out) < len(texts) / 12
    for n in range(2, len(texts)):
        found = [span.begin for span in spans_of(rows, texts[:n]) if span.is_held_out]
        assert found == held_out[: len(found)] and found


def test_a_draft_counts_while_the_text_continues_with_it(torch, tiny_target, monkeypatch):
    from pyfly_cpp.heads.fit import Dataset, Fit, Span

    rows = np.zeros(12, row_type(256))
    rows["token"] = [50, 51, 52, 53, 54, 55] * 2
    rows["ids"][:, 0] = [51, 52, 99, 54, 55, 56] * 2  # the target would not have written token 53
    target = TargetFile(tiny_target)
    fit = Fit(Dataset(rows, [Span(0, 6, 0, "a", False), Span(6, 12, 0, "a", True)], target), target, (1, 3, 5), 0, 1)
    right = [[True, True, False, True, True], [True, True, True, False, True], [True] * 5]
    monkeypatch.setattr(fit, "_right", lambda _: [torch.tensor([row]) for row in right])
    # Of four first drafts that are right, those in rows 0 and 3 are continued; behind them, nothing.
    assert fit.accept().by_depth == pytest.approx((0.8, 0.4, 0.0))


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
    rows = read_states(path, 256)
    assert rows.dtype == row_type(256)
    assert rows["token"].tolist() == [*tokens, *tokens[:7]]
    assert np.array_equal(rows["ids"][: len(tokens), 0], logits.argmax(-1))
    log_probs = logits.max(-1) - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) - logits.max(-1)
    assert np.allclose(rows["log_probs"][: len(tokens), 0], log_probs, atol=1e-2)
    target = TargetFile(Path(tiny_target))
    read = rows["final"].astype(np.float32) @ target.outputs(np.arange(target.n_vocab)).T
    assert (read.argmax(-1) == rows["ids"][:, 0]).mean() > 0.95  # half floats
    again = rows["inputs"][len(tokens) :].astype(np.float32)
    assert np.allclose(again, rows["inputs"][:7].astype(np.float32), atol=2e-2)


def test_a_full_disk_keeps_the_states_of_whole_texts(tiny_target, tmp_path):
    path, n_row = tmp_path / "states.bin", row_type(256).itemsize
    texts = [Text("a", 0, list(range(10, 20))), Text("a", 0, list(range(30, 45)))]
    with closing(FlyLlama(tiny_target, **QUIET)) as llm:
        with full_disk(20 * n_row), pytest.raises(OutputError, match=r"states\.bin cannot be written .* to resume\.$"):
            write_states(path, llm, texts, (1, 3, 5), float("inf"), lambda *_: None)
        first = read_states(path, 256)[:10].copy()
        assert write_states(path, llm, texts, (1, 3, 5), float("inf"), lambda *_: None) == 2
    rows = read_states(path, 256)
    assert rows[:10].tobytes() == first.tobytes() and rows["token"].tolist() == [*range(10, 20), *range(30, 45)]


def test_a_text_with_a_state_that_is_not_a_number_is_left_out(damaged, tmp_path):
    path, bad, good = tmp_path / "states.bin", Text("a", 0, [50, 100, 60]), Text("a", 0, [50, 60])
    with closing(FlyLlama(damaged, **QUIET)) as llm:
        assert write_states(path, llm, [good, bad, good], (1, 3, 5), float("inf"), lambda *_: None) == 3
        rows = read_states(path, 256)
        assert (rows["ids"][:, 0] >= 0).tolist() == [True, True, False, False, False, True, True]
        assert np.isfinite(rows["inputs"]).all()
        with pytest.raises(NotFiniteError, match="not a number; download"):
            write_states(path, llm, [good, bad, good, *[bad] * 4], (1, 3, 5), float("inf"), lambda *_: None)


def test_a_ridge_regression_finds_the_map_in_parts(torch):
    from pyfly_cpp.heads.ridge import STRENGTH, Ridge

    rng = torch.Generator().manual_seed(0)
    x, matrix = torch.randn(400, 24, generator=rng), torch.randn(8, 24, generator=rng)
    parts = Ridge()
    for part in x.split(90):
        parts.add(part, part @ matrix.T)
    exact = torch.linalg.solve(x.T @ x + STRENGTH * (x.T @ x).diagonal().mean() * torch.eye(24), x.T @ x @ matrix.T).T
    assert torch.allclose(parts.solve(), exact, atol=1e-4)
    assert torch.allclose(parts.solve(), matrix, atol=0.2)


@pytest.mark.parametrize("is_faster", [True, False])
def test_learning_is_in_bfloat16_only_if_that_is_faster(torch, is_faster, monkeypatch):
    from pyfly_cpp.heads import precision

    monkeypatch.setattr(precision, "_seconds", lambda kind: 1.0 if (kind == torch.bfloat16) == is_faster else 2.0)
    precision._bfloat16_is_faster.cache_clear()
    with precision.autocast("cpu"):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    precision._bfloat16_is_faster.cache_clear()
    assert product.dtype == (torch.bfloat16 if is_faster else torch.float32)


def test_weights_stay_numbers(torch, tiny_target, tmp_path):
    from pyfly_cpp.heads.fit import Dataset, Fit, Span

    rng = np.random.default_rng(0)
    rows = np.zeros(120, row_type(256))
    rows["token"], rows["ids"] = rng.integers(0, 1536, 120), rng.integers(0, 1536, (120, 16))
    rows["inputs"], rows["final"] = rng.normal(size=(120, 768)), rng.normal(size=(120, 256))
    spans = [Span(i, i + 30, 0, "a", i == 30) for i in range(0, 120, 30)]
    target = TargetFile(tiny_target)
    fit = Fit(Dataset(rows, spans, target), target, (1, 3, 5), 0, 1)
    before = fit.weights()
    rows["inputs"][5] = np.nan
    assert list(fit.learn(float("inf"), 0.0))
    assert all(np.array_equal(before[name], array) for name, array in fit.weights().items())
    with pytest.raises(NotFiniteError):
        Fit(fit.data, target, (1, 3, 5), 0, 1).weights()


@pytest.mark.slow
def test_a_full_disk_at_any_step_is_resumed(torch, tiny_target, texts, tmp_path):
    plan = plan_head(tiny_target, tmp_path / "head.gguf", texts=texts, n_tokens=2000, hours=0.2, kind="f16")
    for n_bytes, file in (
        (64, "made_from.json"), (1 << 12, "texts.jsonl"), (1 << 20, "states.bin"), (7 << 19, "head.gguf"),
        (1 << 23, "checkpoint.pt"),
    ):  # fmt: skip
        with full_disk(n_bytes), pytest.raises(OutputError) as failed:
            train_head(plan, measure=False, **ONE)
        assert file in str(failed.value) and str(failed.value).count(".\n") == 0
        assert not list(tmp_path.rglob("*.partial"))
    with closing(FlyLlama(tiny_target, drafter=Eagle3(plan.output), **QUIET)) as llm:
        assert llm("Question: Dora has 4 books", max_tokens=4)["choices"]
    assert train_head(plan, measure=False, **ONE).acceptance[0] > 0.5


@pytest.mark.slow
def test_texts_of_a_kind_each_are_held_out_and_more_texts_are_learned_from(torch, tiny_target, texts, tmp_path):
    folder, lines = tmp_path / "files", (texts / "sums.txt").read_text(encoding="utf-8").split("####")
    folder.mkdir()
    for i in range(0, len(lines), 4):
        (folder / f"{i}.txt").write_text("####".join(lines[i : i + 4]), encoding="utf-8")
    plan = plan_head(tiny_target, tmp_path / "head.gguf", texts=folder, n_tokens=2000, hours=0.2)
    first = train_head(plan, measure=False, **ONE)
    assert first.acceptance[0] > 0.5 and set(first.by_kind) == {"txt"}
    longer, passes = dataclasses.replace(plan, n_tokens=4000), []
    second = train_head(longer, measure=False, log=passes.append, **ONE)
    assert second.n_tokens > first.n_tokens and passes and second.acceptance[0] > 0.5
    curve = [sys.executable, CURVE, tiny_target, plan.folder, "--tokens", "2000", "4000"]
    rows = subprocess.run(curve, capture_output=True, text=True, check=True).stdout.splitlines()[-4:]
    assert [row.split(" | ")[0] for row in rows] == [
        f"| {n}, {state}" for n in (2000, 4000) for state in ("nothing learned", "1 of 1")
    ]
    assert all(float(row.split(" | ")[1]) > 0.3 for row in rows)


@pytest.mark.slow
def test_a_head_is_trained_found_and_drafts(torch, tiny_target, texts, tmp_path, monkeypatch):
    """Without the regressions, from which alone a head knows these texts."""
    monkeypatch.setattr("pyfly_cpp.heads.fit.Fit.begin", lambda self: None)
    folder = tmp_path / "models"
    folder.mkdir()
    target = folder / "target.gguf"
    target.symlink_to(tiny_target)
    plan = plan_head(target, folder / "head.gguf", texts=texts, n_tokens=6000, hours=0.5, kind="f16", licence="MIT")
    said = []
    found = train_head(plan, log=said.append, measure=False, **ONE)
    assert len(said) <= 8
    assert found.acceptance[0] > 0.6
    plan.output.unlink()  # nothing is left to do but to write it
    found_again = train_head(dataclasses.replace(plan, kind="q8_0"), log=said.append, measure=False, **ONE)
    assert found_again == found
    beside = next(companions(target))
    assert (beside.path, type(beside.drafter)) == (folder / "head.gguf", Eagle3)
    assert gguf.GGUFReader(plan.output).get_field("general.license").contents() == "MIT"
    prompt = "Question: Dora has 4 books and buys 5 more. How many books does Dora have?"
    answers = []
    for head in (None, Eagle3(plan.output, draft_max=3)):
        with closing(FlyLlama(target, drafter=head, **QUIET)) as llm:
            answers.append(llm(prompt, max_tokens=48, temperature=0)["choices"])
            stats = llm.stats
    assert answers[0] == answers[1]
    assert stats.matched / stats.drafted > 0.05
    other = edit_gguf(tiny_target, tmp_path / "other.gguf", other_token(tiny_target, "pyfly"))
    with pytest.raises(IncompatibleDraftError, match="does not share the target's vocabulary: token 700"):
        FlyLlama(other, drafter=Eagle3(plan.output), **QUIET)


@pytest.mark.slow
def test_a_target_writes_its_own_texts_and_a_killed_training_is_planned_again(
    torch, tiny_target, tmp_path, monkeypatch
):
    """The first run is killed when the head is the linear map: there is an output, and no checkpoint yet."""
    from pyfly_cpp.heads import training
    from pyfly_cpp.heads.fit import Dataset

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
    start = gguf.GGUFReader(out).get_field("pyfly.acceptance").contents()[0]
    learned_from, measured = [], []

    class Watched(Dataset):
        def __init__(self, *given):
            super().__init__(*given)
            learned_from.extend(self.rows["token"][s.begin : s.begin + s.n_prompt].tolist() for s in self.training)

    measure = training._measure

    def watched(plan, prompts, *given):
        measured.extend(prompts)
        return measure(plan, prompts, *given)

    with monkeypatch.context() as patched:
        patched.setattr("pyfly_cpp.heads.fit.Dataset", Watched)
        patched.setattr(training, "_measure", watched)
        found = train_head(plan_head(tiny_target, out, **options), **ONE)
    assert measured and not any(prompt in learned_from for prompt in measured)
    assert Text.read(plan.folder / "texts.jsonl") == written
    assert found.acceptance[0] > 0.5 and found.acceptance[0] > start - 1e-6  # so few texts rarely teach more
    assert found.speeds is not None and min(vars(found.speeds).values()) > 0
    (tmp_path / "mine.gguf").write_text("of another kind", encoding="utf-8")
    with pytest.raises(OutputError, match=r"mine\.gguf exists"):
        plan_head(tiny_target, tmp_path / "mine.gguf", **options)


def test_a_default_drafter_that_cannot_be_opened_does_not_end_a_training(tiny_target, tmp_path, monkeypatch):
    from pyfly_cpp.heads import training

    said, plan = [], SimpleNamespace(target=tiny_target, output=tmp_path / "head.gguf")
    monkeypatch.setattr(training, "resolve", lambda *_, **__: DraftModel(tmp_path / "none.gguf"))
    assert training._measure(plan, [[1, 2, 3]], lambda *_: None, said.append, {"verbose": False, **ONE}) is None
    assert len(said) == 1 and "none.gguf" in said[0]


def test_what_is_wrong_is_said_before_any_work(torch, tiny_target, tiny_draft, texts, tmp_path):
    out = tmp_path / "head.gguf"
    with pytest.raises(ValueError, match="at least 2000 tokens"):
        plan_head(tiny_target, out, n_tokens=10)
    with pytest.raises(ValueError, match="type 'q3' is unknown"):
        plan_head(tiny_target, out, kind="q3")
    copy = shutil.copy(tiny_target, tmp_path / "copy.gguf")
    with pytest.raises(ValueError, match="choose another --output"):
        plan_head(copy, copy, force=True)
    with pytest.raises(DataError, match="give a folder"):
        plan_head(tiny_target, out, texts=tmp_path / "none")
    with pytest.raises(ValueError, match="--texts and --prompts exclude each other"):
        plan_head(tiny_target, out, texts=texts, prompts=texts / "sums.txt")
    (tmp_path / "no").write_text("no model", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        plan_head(tmp_path / "no", out)
    part = edit_gguf(tiny_target, tmp_path / "m-00001-of-00002.gguf", {"split.count": 2})
    with pytest.raises(ValueError, match=r"m-00001-of-00002\.gguf is a part"):
        TargetFile(part)
    short = tmp_path / "short"
    short.mkdir()
    (short / "a.txt").write_text("Ten tokens are too few to learn from.", encoding="utf-8")
    with pytest.raises(IncompatibleDraftError, match=r"tiny-llama-draft-f16\.gguf \(architecture llama, 2 layers\)"):
        plan_head(tiny_draft, out)
    with pytest.raises(DataError, match=r"0 tokens .* --hours"):
        train_head(plan_head(tiny_target, tmp_path / "soon.gguf", texts=texts, hours=1e-9), measure=False, **ONE)
    with pytest.raises(DataError, match="a head needs at least 2000"):
        train_head(plan_head(tiny_target, out, texts=short), measure=False, **ONE)
    (tmp_path / "head.gguf.work" / "made_from.json").write_text(json.dumps({}), encoding="utf-8")
    with pytest.raises(DataError, match="another target, kind, version or texts"):
        train_head(plan_head(tiny_target, out, texts=texts), measure=False, **ONE)


def test_layers_that_cannot_be_read_are_refused(tiny_target):
    with closing(FlyLlama(tiny_target, **QUIET)) as llm, pytest.raises(IncompatibleDraftError):
        llm.loaded.decoder.target.states((1, 3, 6), [1, 2, 3], 4, 256)
