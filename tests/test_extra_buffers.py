"""What becomes of llama.cpp's extra buffer types, AMX above all; a machine with AMX is simulated."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import llama_cpp
import pytest

from pyfly_cpp import DraftModel, FlyLlama, _native
from pyfly_cpp.errors import NativeError
from pyfly_cpp.machine import extra_buffers

OPTIONS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1}
PROMPT = "Natalia sold clips to 48 of her friends in April"

LEFT_OUT = """
import sys
from llama_cpp import Llama
from pyfly_cpp import _native
from pyfly_cpp.errors import NativeError
from pyfly_cpp.machine import extra_buffers
extra_buffers.usable()
Llama(sys.argv[1], n_ctx=64)
try:
    _native.leave_out("CPU_REPACK")
except NativeError:
    sys.exit()
print("left out", file=sys.stderr)
Llama(sys.argv[1], n_ctx=64)
"""


class Machine:
    """A CPU with AMX and a llama.cpp that uses it, whose list of buffer types cannot be changed at first."""

    def __init__(self, monkeypatch):
        self.cpu = {"model name": "Xeon", "flags": "fpu amx_bf16 amx_tile amx_int8"}
        self.has_library = True
        self.can_leave_out = False
        self.left_out = []
        monkeypatch.delenv(extra_buffers.VARIABLE, raising=False)
        monkeypatch.setattr(extra_buffers, "_library_has_amx", lambda: self.has_library)
        monkeypatch.setattr(extra_buffers, "cpu_fields", lambda: self.cpu)
        monkeypatch.setattr(_native, "leave_out", self.leave_out)
        # Where the machine is a real one, the tests are guarded already.
        plain = llama_cpp.llama_cpp._lib.llama_model_default_params
        for module in (llama_cpp, llama_cpp.llama_cpp):
            monkeypatch.setattr(module, "llama_model_default_params", plain)

    def leave_out(self, name):
        if not self.can_leave_out:
            raise NativeError("the kernels are not installed")
        self.left_out.append(name)

    def new_process(self):
        extra_buffers.usable.cache_clear()
        extra_buffers.verdict.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    amx = Machine(monkeypatch)
    amx.new_process()
    yield amx
    amx.new_process()


# ---- The verdict -----------------------------------------------------------------------------------------------------


def test_amx_alone_is_left_out(machine):
    machine.can_leave_out = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert extra_buffers.usable()
    assert machine.left_out == ["AMX"]
    assert extra_buffers.verdict().remedy is None


def test_where_the_list_cannot_be_changed_nothing_is_used_and_one_warning_says_so(machine):
    with pytest.warns(RuntimeWarning, match="PYFLY_EXTRA_BUFFERS=1") as caught:
        assert not extra_buffers.usable()
        assert not extra_buffers.usable()
    assert len(caught) == 1


@pytest.mark.parametrize("without", ["library", "cpu", "linux"])
def test_without_amx_nothing_is_left_out(machine, without):
    machine.can_leave_out = True
    if without == "library":
        machine.has_library = False
    else:
        machine.cpu = {"model name": "Xeon", "flags": "fpu avx512f"} if without == "cpu" else {}
    assert extra_buffers.verdict().usable
    assert machine.left_out == []


@pytest.mark.parametrize(("wish", "used"), [("0", False), ("1", True)])
def test_the_variable_decides(machine, monkeypatch, wish, used):
    machine.can_leave_out = True
    monkeypatch.setenv(extra_buffers.VARIABLE, wish)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert extra_buffers.usable() is used
    assert machine.left_out == []


@pytest.mark.parametrize("wish", ["2", "yes", " "])
def test_a_wrong_variable_is_named(machine, monkeypatch, wish, tiny_target):
    monkeypatch.setenv(extra_buffers.VARIABLE, wish)
    with pytest.raises(ValueError, match="PYFLY_EXTRA_BUFFERS"):
        FlyLlama(tiny_target, verbose=False)


def test_this_machine_is_described():
    if not sys.platform.startswith("linux"):
        pytest.skip("AMX is looked for under Linux")
    if os.uname().machine == "x86_64":
        assert {"sse2", "fpu"} <= set(extra_buffers.cpu_fields()["flags"].split())
        assert extra_buffers.cpu_model()


def test_processors_are_named(monkeypatch):
    """Findings are kept for each."""
    arm = {"processor": "0", "CPU implementer": "0x41", "CPU part": "0xd0c"}
    for cpu, name in (({"model name": "Xeon"}, "Xeon"), (arm, "0x41 0xd0c"), ({}, "")):
        monkeypatch.setattr(extra_buffers, "cpu_fields", lambda cpu=cpu: cpu)
        assert extra_buffers.cpu_model() == name


# ---- Models ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quantised(tiny_target, tiny_draft, tmp_path_factory):
    """Target and draft in Q4_0, which llama.cpp repacks on most CPUs."""
    folder = tmp_path_factory.mktemp("quantised")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    params.nthread = 1
    for path in (tiny_target, tiny_draft):
        out = str(folder / Path(path).name).encode()
        assert llama_cpp.llama_model_quantize(path.encode(), out, ctypes.byref(params)) == 0
    return [str(folder / Path(path).name) for path in (tiny_target, tiny_draft)]


@pytest.fixture
def repacked():
    """repacked(load) -> what load() returns, and how many extra buffers it filled, by llama.cpp's log."""
    before, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(before), ctypes.byref(data))
    log = []
    keep = llama_cpp.llama_log_callback(lambda level, text, _: log.append(text))
    llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))

    def call(load):
        log.clear()
        return load(), len(re.findall(rb"(?:CPU_REPACK|AMX) model buffer size", b"".join(log)))

    yield call
    llama_cpp.llama_log_set(before, data)


def load_pair(quantised):
    target, draft = quantised
    return FlyLlama(target, drafter=DraftModel(draft), verbose=False, adaptive=False, kernels="stock", **OPTIONS)


def test_a_type_that_is_left_out_is_offered_to_no_model(quantised):
    """In a process of its own: nothing brings it back."""
    done = subprocess.run([sys.executable, "-c", LEFT_OUT, quantised[0]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, _, after = done.stderr.partition("left out")
    if "CPU_REPACK model buffer" not in before or not after:
        pytest.skip("llama.cpp repacks nothing here, or our kernels cannot be installed")
    assert "AMX model buffer" not in before
    assert "model buffer" in after and "CPU_REPACK model buffer" not in after


def test_target_and_draft_do_without(machine, quantised, repacked):
    machine.can_leave_out = True
    llm, n = repacked(lambda: load_pair(quantised))
    llm.close()
    if n < 2:
        pytest.skip("llama.cpp does not repack Q4_0 on this CPU")
    machine.can_leave_out = False
    machine.new_process()
    with pytest.warns(RuntimeWarning, match="PYFLY_EXTRA_BUFFERS") as caught:
        llm, n = repacked(lambda: load_pair(quantised))
    assert n == 0
    assert len(caught) == 1
    assert llm(PROMPT, max_tokens=8, temperature=0)["usage"]["completion_tokens"] == 8
    assert llm.stats.drafted > 0
    llm.close()


def test_plain_models_can_do_without_too(machine, quantised, repacked):
    machine.can_leave_out = True
    extra_buffers.guard_llama_cpp()
    assert llama_cpp.llama_model_default_params().use_extra_bufts
    machine.can_leave_out = False
    machine.new_process()
    with pytest.warns(RuntimeWarning, match="PYFLY_EXTRA_BUFFERS"):
        extra_buffers.guard_llama_cpp()
    extra_buffers.guard_llama_cpp()
    assert not llama_cpp.llama_model_default_params().use_extra_bufts
    llm, n = repacked(lambda: llama_cpp.Llama(quantised[0], verbose=False, **OPTIONS))
    assert n == 0
    llm.close()
