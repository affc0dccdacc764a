"""Prompt lookup in earlier answers and named texts: what is found, remembered, kept in a file and refused."""

from __future__ import annotations

import contextlib
from functools import partial

import llama_cpp
import numpy as np
import pytest

from pyfly_cpp import Exact, FlyBatch, FlyLlama, Margin, PromptLookup, Stochastic
from pyfly_cpp._native import Batch, ScriptedTarget
from pyfly_cpp.decoding import Decoding
from pyfly_cpp.decoding.drafters import Host
from pyfly_cpp.decoding.drafters.lookup_texts import add_answers, read_answers, read_texts, write_answers
from pyfly_cpp.decoding.presets import Preset, PresetError, load_preset, save_preset

N_VOCAB, EOG = 50, 0
OPTIONS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "adaptive": False}


def counting(history):
    """A model that counts: 10, 11, ... 29, end."""
    row = np.zeros(N_VOCAB, dtype=np.float32)
    last = int(history[-1])
    row[last + 1 if 10 <= last < 29 else EOG if last == 29 else 10] = 9
    return row


@contextlib.contextmanager
def batch_of(n_slots, memory=1000, **settings):
    with ScriptedTarget(counting, N_VOCAB, n_sequences=n_slots) as target:
        target.protect((), [EOG])
        lookup = PromptLookup(memory=memory, **settings)
        drafter = lookup.open(Host(lambda: target, 10, False, {}, lambda: None))
        with drafter, Batch(target) as batch:
            batch.configure([(drafter, 10)])
            yield batch, drafter


def answer(batch, slot, prompt, gate=None, **settings):
    """(the answer, in how many steps) of one request."""
    gate = gate or Exact()
    text = batch.slots[slot]
    text.begin(prompt, gate.nodes(), gate.window.config(), **settings)
    n_steps, out = 0, []
    while EOG not in out:
        (progress,) = batch.step()
        assert progress.failure is None
        n_steps += progress.is_step
        out += [token for _, token in text.tokens()]
    text.end()
    return out[: out.index(EOG) + 1], n_steps


def test_an_answer_is_found_by_the_next_request_in_any_slot():
    with batch_of(2) as (batch, drafter):
        first, slow = answer(batch, 0, [5, 6, 7])
        second, fast = answer(batch, 1, [5, 6, 8])
        assert first == second == [*range(10, 30), EOG]
        assert slow == 21 and fast < 6
        # The end of the prompt, for its n-grams; no control token.
        assert list(drafter.answers[:24]) == [5, 6, 7, *range(10, 30), -1]


def test_the_same_history_gives_the_same_drafts():
    def run():
        with batch_of(1) as (batch, drafter):
            return [answer(batch, 0, [5, n]) for n in range(5)], drafter.answers.tolist()

    assert run() == run()


def test_without_a_memory_nothing_is_remembered():
    with batch_of(1, memory=0) as (batch, drafter):
        assert [answer(batch, 0, [5, 6, 7])[1] for _ in range(2)] == [21, 21]
        assert len(drafter.answers) == 0


@pytest.mark.parametrize("gate", [Margin(0.3), Stochastic()], ids=str)
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_request_whose_text_drafts_can_change_looks_in_earlier_answers_if_it_may_follow_them(gate, adaptive):
    with batch_of(1) as (batch, drafter):
        batch.configure([(drafter, 10)], adaptive=adaptive)
        answer(batch, 0, [5, 6, 7])
        assert answer(batch, 0, [5, 6, 7], gate)[1] == 21
        if not adaptive:
            assert answer(batch, 0, [5, 6, 7], gate, follows_answers=1)[1] < 6
            assert answer(batch, 0, [5, 6, 7], gate, follows_answers=1, owner=3)[1] == 21, "of its owner alone"
            assert answer(batch, 0, [5, 6, 7])[1] < 6


def test_the_older_half_goes_when_the_memory_is_full():
    with batch_of(1, memory=60) as (batch, drafter):
        for n in range(30, 50):
            answer(batch, 0, [5, 6, n])
            assert len(drafter.answers) <= 60
        assert drafter.answers[-24:-21].tolist() == [5, 6, 49] and 30 not in drafter.answers


def test_owners_do_not_look_in_answers_of_others():
    with batch_of(1) as (batch, drafter):
        assert answer(batch, 0, [5, 6, 7])[1] == answer(batch, 0, [5, 6, 7], owner=3)[1] == 21
        remembered = len(drafter.answers)
        assert answer(batch, 0, [5, 6, 7])[1] == answer(batch, 0, [5, 6, 7], owner=3)[1] < 6
        assert len(drafter.answers) < 2 * remembered + 5  # those of owner 0
        assert batch.slots[0].counters()["accepted_from_answers"] > 30


def test_the_memory_is_bounded_for_all_owners_together():
    with batch_of(1, memory=60) as (batch, drafter):
        answer(batch, 0, [5, 6, 7])
        for owner in range(1, 20):
            answer(batch, 0, [5, 6, 7], owner=owner)  # room for two answers: the largest memory loses its older half
        assert len(drafter.answers) < 24
        assert answer(batch, 0, [5, 6, 7], owner=19)[1] < 21


def test_what_the_caller_was_not_given_is_not_remembered():
    with batch_of(1) as (batch, drafter):
        answer(batch, 0, [5, 6, 7])
        n_before = len(drafter.answers)
        text = batch.slots[0]
        text.begin([5, 6, 7], Exact().nodes(), Exact().window.config())
        while len(text.tokens()) < 5:  # a draft of several tokens was accepted
            batch.step()
        text.end(n_keep=3)
        assert drafter.answers[n_before:].tolist() == [5, 6, 7, 10, -1]


# ---- Files -----------------------------------------------------------------------------------------------------------


def test_a_memory_file_is_kept_and_found(tiny_target, tmp_path):
    path = tmp_path / "answers.bin"

    def steps(prompt):
        llm = FlyLlama(tiny_target, drafter=PromptLookup(memory_file=path), **OPTIONS)
        text = llm.create_completion(prompt, max_tokens=40, temperature=0)["choices"][0]["text"]
        n_steps = llm.stats.rounds
        llm.close()
        return text, n_steps

    text, slow = steps("Natalia sold clips to")
    again, fast = steps("Natalia sold clips to")
    assert text == again and fast < slow / 2 and [file.name for file in tmp_path.iterdir()] == ["answers.bin"]


def test_a_memory_file_stays_where_it_was_named(tiny_target, tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    with FlyLlama(tiny_target, drafter=PromptLookup(memory_file="answers.bin"), **OPTIONS) as llm:
        llm("Tom has", max_tokens=4, temperature=0)
        monkeypatch.chdir(tmp_path / "two")
    assert [file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.bin")] == ["one/answers.bin"]


def test_a_new_drafter_begins_with_what_the_old_one_remembers(tiny_target, tmp_path):
    path = tmp_path / "answers.bin"
    with FlyLlama(tiny_target, drafter=PromptLookup(memory_file=path), **OPTIONS) as llm:
        llm("Natalia sold clips to", max_tokens=40, temperature=0)
        llm.drafter = PromptLookup(memory_file=path, num_pred_tokens=20)
        llm("Tom has", max_tokens=4, temperature=0)
        vocabulary = llm.loaded.decoder.target.vocabulary
    assert len(read_answers(path, vocabulary)) > 40


def test_two_processes_keep_the_answers_of_both(tiny_target, tmp_path):
    path = tmp_path / "answers.bin"
    one, two = (FlyLlama(tiny_target, drafter=PromptLookup(memory_file=path), **OPTIONS) for _ in range(2))
    vocabulary = one.loaded.decoder.target.vocabulary
    one("Natalia sold clips to", max_tokens=8, temperature=0)
    two("Tom has", max_tokens=8, temperature=0)
    expected = one.loaded.decoder.drafters[0].answers.tolist()
    one.close()
    two.loaded.decoder.keep_answers()
    two("Once upon", max_tokens=8, temperature=0)
    expected += two.loaded.decoder.drafters[0].answers.tolist()
    two.close()
    assert read_answers(path, vocabulary).tolist() == expected and expected.count(-1) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["answers.bin"]


def test_the_newest_answers_stay_in_a_full_file(tmp_path):
    path, arrays = tmp_path / "answers.bin", [np.arange(n, dtype=np.int32) for n in (6, 8, 2)]
    write_answers(path, 7, arrays[0])
    add_answers(path, 7, arrays[1], arrays[2], 10)
    assert read_answers(path, 7).tolist() == [2, 3, 4, 5, *range(2, 8)]
    add_answers(path, 7, np.array([6, 7, 70, 71], dtype=np.int32), arrays[1], 10)
    assert read_answers(path, 7).tolist() == [4, 5, *range(2, 8), 70, 71], "older answers made room in the memory"
    add_answers(path, 7, np.array([80, 81, 6, 7], dtype=np.int32), arrays[1], 10)
    assert read_answers(path, 7).tolist() == [*range(4, 8), 70, 71, 80, 81, 6, 7], "nothing of the old ones is left"


@pytest.mark.parametrize("change", ["magic", "content", "short", "long", "empty"])
def test_a_broken_memory_file_is_refused(tiny_target, tmp_path, change):
    path = tmp_path / "answers.bin"
    write_answers(path, 7, np.arange(100, dtype=np.int32))
    assert read_answers(path, 7).tolist() == list(range(100))
    data = bytearray(path.read_bytes())
    if change in ("magic", "content"):
        data[{"magic": 3, "content": 70}[change]] ^= 1
    path.write_bytes({"short": data[:-1], "long": data + b"\0", "empty": b""}.get(change, data))
    with pytest.raises(ValueError, match=r"answers\.bin"):
        read_answers(path, 7)


def test_a_memory_of_another_vocabulary_is_refused_and_left_alone(tiny_target, tmp_path):
    path = tmp_path / "answers.bin"
    write_answers(path, 7, np.arange(3, dtype=np.int32))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"answers\.bin.*vocabulary"):
        FlyLlama(tiny_target, drafter=PromptLookup(memory_file=path), **OPTIONS)
    assert path.read_bytes() == before


def test_texts_that_are_named(tiny_target, tmp_path):
    llm = llama_cpp.Llama(tiny_target, vocab_only=True, verbose=False)
    vocabulary = llama_cpp.llama_model_get_vocab(llm.model)
    (tmp_path / "src" / ".git").mkdir(parents=True)
    (tmp_path / "src" / "a.txt").write_text("one text <|im_end|>\n")
    (tmp_path / "src" / ".git" / "b").write_text("hidden")
    (tmp_path / "src" / "c.bin").write_bytes(b"\xff\0")
    one = read_texts([tmp_path / "src" / "a.txt"], vocabulary)
    assert one[-1] == -1 and (one[:-1] >= 0).all()
    assert read_texts([tmp_path / "src", tmp_path / "src" / "a.txt"], vocabulary).tolist() == one.tolist()
    for bad in (tmp_path / "src" / "c.bin", tmp_path / "missing"):
        with pytest.raises(ValueError, match=bad.name):
            read_texts([bad], vocabulary)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"):
        read_texts([tmp_path / "empty"], vocabulary)


def test_a_loose_request_looks_in_named_texts(tiny_target, tmp_path):
    plain = FlyLlama(tiny_target, **OPTIONS)
    written = plain.create_completion("Natalia sold", max_tokens=60, temperature=0)["choices"][0]["text"]
    (tmp_path / "text").write_text("Natalia sold" + written)
    llm = FlyLlama(tiny_target, drafter=PromptLookup(texts=[tmp_path]), gate=Margin(0.3), **OPTIONS)
    llm.create_completion("Natalia sold", max_tokens=40, temperature=0)
    assert llm.stats.matched > 10


def test_all_requests_of_a_batch_share_the_memory(tiny_target):
    options = {name: value for name, value in OPTIONS.items() if name != "n_ctx"}
    with FlyBatch(tiny_target, n_parallel=2, n_ctx=256, drafter=PromptLookup(), **options) as batch:
        (first,) = batch.complete(["Natalia sold clips to"], max_tokens=40, temperature=0)
        n_first = batch.stats.rounds
        both = batch.complete(["Natalia sold clips to"] * 2, max_tokens=40, temperature=0)
        assert {one["choices"][0]["text"] for one in both} == {first["choices"][0]["text"]}
        assert batch.stats.rounds - n_first < n_first


@pytest.mark.parametrize("gate", [Margin(0.3), Stochastic()], ids=str)
def test_answers_of_one_fly_llama_help_later_ones_under_any_gate(tiny_target, gate):
    """In a batch, whose requests come from anybody in any order, they do not."""
    question = {"max_tokens": 40, "temperature": 0.01, "seed": 1}

    def steps(ask, one):
        ask(**question)
        n_first = one.stats.rounds
        ask(**question)
        return n_first, one.stats.rounds - n_first

    for memory in (2**18, 0):
        with FlyLlama(tiny_target, drafter=PromptLookup(memory=memory), gate=gate, **OPTIONS) as llm:
            first, second = steps(partial(llm.create_completion, "Natalia sold clips to"), llm)
            assert (second < first / 2) == (memory > 0)
    options = {name: value for name, value in OPTIONS.items() if name != "n_ctx"}
    with FlyBatch(tiny_target, n_parallel=1, n_ctx=256, drafter=PromptLookup(), gate=gate, **options) as batch:
        first, second = steps(partial(batch.complete, ["Natalia sold clips to"]), batch)
        assert second == first


def test_paths_in_a_preset_are_relative_to_its_folder(tmp_path):
    lookup = PromptLookup(texts=["src", "/abs"], memory_file="answers.bin")
    save_preset(Preset(Decoding(drafter=lookup)), tmp_path / "p.json")
    found = load_preset(tmp_path / "p.json").decoding.drafter
    assert found == PromptLookup(texts=[str(tmp_path / "src"), "/abs"], memory_file=str(tmp_path / "answers.bin"))
    (tmp_path / "p.json").write_text('{"format": 1, "drafter": {"kind": "lookup", "texts": [3]}}')
    with pytest.raises(PresetError, match="texts"):
        load_preset(tmp_path / "p.json")


def test_what_contradicts_itself_is_refused():
    for make in (
        lambda: PromptLookup(memory=-1),
        lambda: PromptLookup(memory=0, memory_file="x"),
        lambda: PromptLookup(texts="src"),
    ):
        with pytest.raises(ValueError):
            make()
