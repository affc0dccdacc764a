"""How many threads decode: fixed numbers, and "auto"."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import llama_cpp
import pytest
from click.testing import CliRunner

from pyfly_cpp import DraftModel, FlyLlama
from pyfly_cpp.cli import cli
from pyfly_cpp.decoding.presets import FORMAT, load_preset
from pyfly_cpp.machine.conditions import disturbance, used_by_others
from pyfly_cpp.machine.threads import AUTO, physical_cores, threads_sleep


def load(path, **settings):
    return FlyLlama(str(path), n_ctx=256, verbose=False, **settings)


@pytest.mark.parametrize("settings", [{}, {"n_threads": AUTO}, {"n_threads": None}, {"n_threads_batch": AUTO}])
def test_auto_is_the_default(tiny_target, settings):
    llm = load(tiny_target, **settings)
    assert llm.n_threads == llm.n_threads_batch == physical_cores()  # the base class stores numbers
    list(llm.create_completion("Tom has 3 apples", max_tokens=4, stream=True))
    threads = llm.stats.threads
    assert 1 <= threads.n <= threads.n_max == physical_cores()
    assert llm.stats.as_dict()["threads"]["n_max"] == threads.n_max
    llm.close()


def test_a_number_is_fixed(tiny_target):
    llm = load(tiny_target, n_threads=1)
    assert llm.n_threads == 1
    assert llm.n_threads_batch == physical_cores()
    llm.create_completion("Tom has", max_tokens=4)
    assert llm.stats.threads is None
    llm.close()
    llm = load(tiny_target, n_threads=AUTO, n_threads_batch=1)  # batches keep theirs
    llm.create_completion("Tom has", max_tokens=4)
    assert (llm.n_threads_batch, llm.stats.threads.n_max) == (1, physical_cores())
    llm.close()


def test_auto_survives_pickling(tiny_target):
    llm = load(tiny_target)
    state = llm.__getstate__()
    assert (state["n_threads"], state["n_threads_batch"]) == (AUTO, AUTO)
    llm.close()
    llm = load(tiny_target, n_threads=1)
    assert llm.__getstate__()["n_threads"] == 1
    assert llm.__getstate__()["n_threads_batch"] == physical_cores()
    llm.close()


@pytest.mark.parametrize("n_threads", [None, 1])
def test_the_text_is_that_of_one_thread(tiny_target, tiny_draft, n_threads):
    prompt, n = "Tom has 3 apples and buys", 24
    plain = load(tiny_target, n_threads=1, n_threads_batch=1)
    expected = plain.create_completion(prompt, max_tokens=n, temperature=0.0)["choices"][0]["text"]
    plain.close()
    llm = load(tiny_target, drafter=DraftModel(tiny_draft, n_threads=n_threads), adaptive=False)
    assert llm.create_completion(prompt, max_tokens=n, temperature=0.0)["choices"][0]["text"] == expected
    assert llm.stats.drafted > 0
    llm.close()


def test_logits_do_not_depend_on_the_thread_count(tiny_target):
    """Else a text would depend on what other programs do. (With flash attention they do: docs/how-it-decides.md.)"""
    llm = llama_cpp.Llama(tiny_target, n_ctx=1024, n_threads=3, n_threads_batch=3, logits_all=True, verbose=False)
    for n_rows in (1, 8):
        rows = []
        for n_threads in (1, 2, 3):
            llama_cpp.llama_set_n_threads(llm.ctx, n_threads, n_threads)
            llm.reset()
            llm.eval([10 + i % 90 for i in range(600)])
            llm.eval(list(range(20, 20 + n_rows)))
            rows.append(llm.scores[600 : 600 + n_rows].copy())
        assert all((row == rows[0]).all() for row in rows)
    llm.close()


def test_a_draft_takes_auto(tmp_path):
    assert DraftModel("draft.gguf", n_threads=AUTO) == DraftModel("draft.gguf")
    preset = tmp_path / "preset.json"
    drafter = {"kind": "draft", "model_path": "draft.gguf", "n_threads": AUTO}
    preset.write_text(json.dumps({"format": FORMAT, "drafter": drafter}), encoding="utf-8")
    assert load_preset(preset).decoding.drafter == DraftModel(str(tmp_path / "draft.gguf"))
    with pytest.raises(ValueError, match=r"n_threads must be an integer in 1..512, not 'many'"):
        DraftModel("draft.gguf", n_threads="many")


@pytest.mark.parametrize("command", ["complete", "bench"])
def test_the_option(command):
    done = CliRunner().invoke(cli, [command, "-t", "many"])
    assert done.exit_code == 2
    assert "'many' is not a number of threads" in done.output
    done = CliRunner().invoke(cli, [command, "-t", "0"])
    assert done.exit_code == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/stat")
def test_others_are_seen():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            assert used_by_others() > 0.2
        finally:
            busy.kill()


@pytest.mark.parametrize(("policy", "sleeps"), [(None, False), ("", False), ("active", False), (" Passive", True)])
def test_sleeping_threads_are_seen(policy, sleeps, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    assert threads_sleep() == sleeps


def test_a_busy_machine_is_told():
    idle = {"used_by_others": 0.1, "load_before": 9.0, "physical_cores": 4}
    assert disturbance(idle) is None
    assert "1.3 of 4 cores" in disturbance({**idle, "used_by_others": 1.32})
    assert "OMP_WAIT_POLICY" in disturbance({**idle, "threads_sleep": True})
    unseen = {**idle, "used_by_others": None}
    assert "9.0 on 4 cores" in disturbance(unseen)
    assert disturbance({**unseen, "load_before": 0.5}) is None


@pytest.mark.skipif(not sys.platform.startswith("linux") or physical_cores() < 2, reason="nobody says which are free")
@pytest.mark.parametrize("n_each, nice", [(1, 0), (4, 10)])  # many of low priority take a part of each core
def test_a_busy_machine_is_begun_with_its_free_cores(tiny_target, n_each, nice):
    """A prompt may be a single evaluation, which all cores read many times as slowly beside others."""
    code = f"import os; os.nice({nice})\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(n_each * physical_cores())]
    try:
        time.sleep(0.5)
        llm = load(tiny_target)
        assert llm.create_completion("Tom has 3 apples", max_tokens=1)["choices"]
        assert llm.stats.threads.n < physical_cores() and llm.stats.threads.changes == 0
        llm.close()
    finally:
        for process in busy:
            process.kill()
            process.wait()
