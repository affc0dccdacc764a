"""A drafter that is given is governed, and what it costs is measured at the first two loads, before a request."""

from __future__ import annotations

import json
import math
import pickle
import shutil

import pytest
from heads import EAGLE3, HYBRID

from pyfly_cpp import MTP, DraftModel, Eagle3, FlyBatch, FlyLlama, PromptLookup, _native
from pyfly_cpp.engine.costs import VARIABLE, _describe
from pyfly_cpp.errors import NativeError
from pyfly_cpp.machine import cache

OPTIONS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
PROMPT = [260, 87, 395, 77, 260, 87]


def reverse(tokens):
    """A caller's own drafter."""
    return tokens[::-1][:3]


def answer(llm, prompt=PROMPT, n=12):
    stream = llm.generate(prompt, temp=0.0)
    out = [next(stream) for _ in range(n)]
    stream.close()
    return out


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """How often something was measured, with a cache folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    times = []
    measure = _native.Batch.measure

    def counted(batch):
        times.append(len(batch.drafters))
        return measure(batch)

    monkeypatch.setattr(_native.Batch, "measure", counted)
    return times


@pytest.fixture
def load(tiny_target, tiny_draft):
    """Loads the tiny target; everything is closed at the end."""
    loaded = []

    def load_one(**arguments):
        loaded.append(
            FlyLlama(tiny_target, **{**OPTIONS, "drafter": DraftModel(tiny_draft), "flash_attn": False, **arguments})
        )
        return loaded[-1]

    yield load_one
    for llm in loaded:
        llm.close()


# ---- Who is governed -------------------------------------------------------------------------------------------------


def test_a_length_of_one_request_leaves_a_batch_governed(tiny_target, tiny_draft):
    with FlyBatch(tiny_target, 1, drafter="auto", draft_model=DraftModel(tiny_draft), **OPTIONS) as batch:
        assert batch.model.draft_lengths(batch.llama.decoding.but(draft_max=4)) == [4, 4]


def test_a_draft_model_of_a_name_is_told_from_another_that_takes_its_place(
    tiny_draft, tiny_target, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYFLY_MODELS", str(tmp_path))
    kept = []
    for path in (tiny_draft, tiny_target):
        shutil.copy(path, tmp_path / "mine.gguf")
        kept.append(_describe(DraftModel("mine")))
    assert kept[0] != kept[1]


def test_a_drafter_that_is_given_is_governed_unless_a_length_is_asked_for(load, tiny_draft):
    model, short = DraftModel(tiny_draft), DraftModel(tiny_draft, draft_max=4)
    for drafter, given, is_governed, k in [
        (model, {}, True, 8),
        (short, {}, False, 4),
        (PromptLookup(), {}, True, 10),
        (PromptLookup(num_pred_tokens=5), {}, True, 5),
        (reverse, {}, True, 10),
        ([PromptLookup(), model], {}, True, 10),
        ([PromptLookup(), short], {}, False, 10),
        (model, {"draft_max": 3}, False, 3),
        (model, {"draft_max": 0}, False, 0),
        (model, {"adaptive": False}, False, 8),
        (model, {"adaptive": True, "draft_max": 3}, True, 3),
        (short, {"adaptive": True}, True, 4),
        (None, {}, False, 0),
    ]:
        llm = load(drafter=drafter, **given)
        assert (llm.adaptive, llm.draft_max) == (is_governed, k), (drafter, given)
        answer(llm)
        governor = llm.stats.governor
        assert (governor is not None) == is_governed
        assert not is_governed or len(governor.target_seconds) == k + 1


def test_assigning_works_the_same_way(load, tiny_draft):
    llm = load()
    llm.draft_max = 4
    assert not llm.adaptive
    expected = answer(llm)
    assert llm.stats.drafted == 4 * llm.stats.rounds
    llm.draft_max = None
    assert llm.adaptive and answer(llm) == expected
    llm.adaptive = False
    assert not llm.adaptive and llm.draft_max == 8
    llm.adaptive = None
    assert llm.adaptive
    llm.drafter = DraftModel(tiny_draft, draft_max=2)
    assert not llm.adaptive and llm.draft_max == 2
    llm.adaptive = True
    assert llm.adaptive and llm.draft_max == 2
    assert pickle.loads(pickle.dumps(llm)).adaptive


# ---- What is measured ------------------------------------------------------------------------------------------------


def every_drafter(tiny_target, tiny_draft):
    yield tiny_target, DraftModel(tiny_draft), 4
    yield tiny_target, DraftModel(tiny_draft, p_min=0.9), None  # stops early on made-up texts
    yield tiny_target, DraftModel(tiny_draft, n_ctx=16, n_batch=4), None
    yield tiny_target, Eagle3(EAGLE3), 2
    yield HYBRID, MTP(), 2
    yield HYBRID, PromptLookup(), 0
    yield HYBRID, DraftModel(tiny_draft), 4
    yield tiny_draft, DraftModel(HYBRID), 4
    yield tiny_target, [PromptLookup(), DraftModel(tiny_draft)], 4
    yield tiny_target, reverse, 0


@pytest.mark.parametrize("which", range(10))
def test_nothing_is_counted_and_no_text_is_changed(which, tiny_target, tiny_draft, measured):
    path, drafter, n_drafts = list(every_drafter(tiny_target, tiny_draft))[which]
    path = str(path)
    plain = FlyLlama(path, **OPTIONS)
    expected = answer(plain)
    plain.close()
    llm = FlyLlama(path, drafter=drafter, **OPTIONS)
    assert len(measured) == 1 and llm.n_tokens == 0
    stats = llm.stats
    assert (stats.rounds, stats.prefilled, stats.drafted, stats.checkpoints, stats.seconds_verify) == (0, 0, 0, 0, 0.0)
    assert all(seconds > 0 for seconds in stats.governor.target_seconds)
    drafting = [seconds for _, many in stats.governor.draft_seconds for seconds in many if seconds > 0]
    assert n_drafts is None or (len(drafting) >= n_drafts and (n_drafts > 0 or not drafting))
    assert answer(llm) == expected and llm.stats.prefilled <= len(PROMPT)
    llm.adaptive = False
    assert answer(llm) == expected
    llm.close()


def test_a_callers_own_drafter_is_not_asked_about_made_up_texts(load, measured):
    asked = []
    llm = load(drafter=lambda tokens: asked.append(list(tokens)) or [])
    assert len(measured) == 1 and not asked
    answer(llm)
    assert all(history[: len(PROMPT)] == PROMPT for history in asked)


def test_only_where_it_is_needed_and_nothing_is_lost(load, measured, tiny_draft):
    for arguments in (
        {"adaptive": False},
        {"draft_max": 4},
        {"drafter": None},
        {"drafter": PromptLookup(), "embedding": True},
    ):
        load(**arguments)
    assert not measured
    long = PROMPT * 8
    llm = load(drafter=None)
    expected = answer(llm, long)
    n_prefilled = llm.stats.prefilled
    llm.drafter = DraftModel(tiny_draft)  # there is a request in the context
    assert answer(llm, long) == expected and llm.stats.prefilled < 2 * n_prefilled
    assert not measured
    answer(llm, PROMPT)
    assert not measured
    llm.reset()
    answer(llm, PROMPT)
    assert len(measured) == 1
    assert answer(llm, long) == expected and len(measured) == 1


def test_several_requests_at_once(measured, tiny_target, tiny_draft, tmp_path):
    """For them it is measured with all slots; what they draft together, too."""
    for _ in range(3):
        with FlyBatch(tiny_target, 3, drafter=DraftModel(tiny_draft), **OPTIONS) as batch:
            assert all(seconds > 0 for seconds in batch.stats.governor.target_seconds)
            assert len(batch.complete(["a", "b", "c", "d"], max_tokens=5, temperature=0)) == 4
    assert len(measured) == 2
    costs = json.loads(kept(tmp_path)[0].read_text())["costs"]
    assert costs["rows"][-1][0] == 3 * 9
    assert [(n, k) for _, n, k, _ in costs["drafts"]] == [(1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (3, 4)]


def test_a_draft_beside_a_prompt_looks_no_cheaper(tiny_target, tiny_draft, monkeypatch):
    """What a batch holds of prompts costs the same whatever is drafted. Rows cost what they weigh here, and a draft
    more than the row that it saves."""
    rows = tuple((n, 1000.0 * n) for n in (1, 2, 3, 4, 8, 16, 64, 512))
    drafts = tuple((0, n, k, 2000.0 * n * k) for n in (1, 2) for k in (1, 2, 4, 8))
    monkeypatch.setattr(_native.Batch, "measure", lambda _: _native.Costs(rows, drafts, (500.0,)))
    with FlyBatch(tiny_target, 4, drafter=DraftModel(tiny_draft), **OPTIONS) as batch:
        batch.complete([PROMPT * n for n in (1, 3, 7, 60, 40, 50)], max_tokens=16, temperature=0)
        assert batch.stats.rounds > 50
        assert batch.stats.drafted == 0


# ---- What is kept ----------------------------------------------------------------------------------------------------


def kept(tmp_path):
    return sorted((tmp_path / "cache" / "pyfly-cpp" / "costs").glob("*"))


def test_twice_for_each_setup(load, measured, tmp_path, tiny_draft, monkeypatch):
    load()
    assert len(measured) == len(kept(tmp_path)) == 1
    second = load().stats.governor
    assert len(measured) == 2 and len(kept(tmp_path)) == 1
    assert load().stats.governor == second and len(measured) == 2
    other = tmp_path / "draft.gguf"
    shutil.copy(tiny_draft, other)
    for n, arguments in enumerate(
        ({"drafter": DraftModel(other)}, {"drafter": DraftModel(tiny_draft, p_min=0.5)}, {"n_threads": 2},
         {"n_ctx": 256}, {"flash_attn": True}, {"type_k": 8}, {"drafter": PromptLookup()},
         {"adaptive": True, "draft_max": 4}, {"kv_overrides": {"llama.rope.freq_base": 5000.0}})
    ):  # fmt: skip
        for _ in range(3):
            load(**arguments)
        assert len(measured) == 2 * len(kept(tmp_path)) == 2 * n + 4, arguments
    with open(other, "ab") as file:
        file.write(b"\0")  # llama.cpp does not mind, but it is another file now
    load(drafter=DraftModel(other))
    assert len(measured) == 2 * n + 5
    monkeypatch.setattr(_native, "kernels_isa", lambda: "another")  # as PYFLY_ISA can make it
    load()
    assert len(measured) == 2 * n + 6


def test_a_slow_moment_is_forgotten_at_the_next_load(load, tmp_path, monkeypatch):
    """A drafter that was measured as too dear to try is tried again. Of each size, the lower cost counts."""
    rows, slow = ((1, 900.0), (2, 1000.0), (8, 2000.0)), ((1, 800.0), (2, 4000.0), (4, 5000.0))
    cheap, dear = ((0, 1, 1, 100.0), (0, 1, 8, 700.0)), ((0, 1, 1, 9000.0), (0, 1, 8, 650.0))
    measured = [_native.Costs(slow, dear, (70.0,), 3.0), _native.Costs(rows, cheap, (50.0,), 4.0)]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(_native.Batch, "measure", lambda _: measured.pop(0))
    llm = load()
    answer(llm)
    assert llm.stats.drafted == 0
    llm = load()
    answer(llm)
    assert llm.stats.drafted > 0 and not measured
    assert json.loads(kept(tmp_path)[0].read_text())["costs"] == {
        "rows": [[1, 800.0], [2, 1000.0], [4, 5000.0], [8, 2000.0]],
        "drafts": [[0, 1, 1, 100.0], [0, 1, 8, 650.0]],
        "catch_up": [50.0],
        "change": 4.0,
    }


DAMAGED = [
    "", "{", "[]", "null", '{"costs": 7}', '{"costs": {}}', "[" * 100_000, "\udcff",
    *(
        json.dumps({"times": times, "costs": {"rows": [[1, 900]], "drafts": [], "catch_up": [0], "change": 0, **costs}})
        for times, costs in [
            (1, {"rows": []}), (1, {"rows": [[1, -5]]}), (1, {"rows": [[1, math.nan]]}), (1, {"rows": [[1]]}),
            (1, {"rows": [{"n": 1, "us": 900.0}]}), (1, {"rows": [[math.inf, 5]]}), (1, {"drafts": [[7, 1, 1, 5.0]]}),
            (1, {"drafts": [["a", 1, 1, 5.0]]}), (1, {"drafts": [{"drafter": 0}]}), (1, {"catch_up": []}),
            (1, {"catch_up": "abc"}), (1, {"change": None}), (math.inf, {}), ("two", {}), (None, {}),
        ]
    ),
]  # fmt: skip


def test_a_damaged_file_is_measured_anew(load, measured, tmp_path):
    load()
    (path,) = kept(tmp_path)
    good = json.loads(path.read_text())
    for n, text in enumerate(DAMAGED):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        load()
        assert len(measured) == n + 2, text
        assert json.loads(path.read_text())["setup"] == good["setup"]


def test_a_cache_that_cannot_be_used_is_no_error(load, measured, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the folder would be")
    cache._warn_unwritable.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"cannot be kept in the cache folder.*; set \w+ to a folder") as told:
        load()
        answer(load())
    assert len(measured) == 2 and len(told) == 1, "it is told once"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    load()
    assert len(measured) == 3


def test_the_variable(load, measured, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    load(), load()
    assert len(measured) == 2 and not kept(tmp_path)
    monkeypatch.setenv(VARIABLE, "0")
    llm = load()
    assert len(measured) == 2 and llm.adaptive and set(llm.stats.governor.target_seconds) == {0.0}
    answer(llm)
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match=r"PYFLY_COSTS is 'yes'; set it to 0 or 1, or not at all\."):
        load()


def test_what_cannot_be_measured_is_no_error(load, monkeypatch):
    def fail(batch):
        raise NativeError("llama_decode on the target returned -3.")

    monkeypatch.setattr(_native.Batch, "measure", fail)
    llm = load()
    assert llm.adaptive and len(answer(llm)) == 12
