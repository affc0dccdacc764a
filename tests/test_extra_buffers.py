"""What happens where llama.cpp's AMX kernels crash; that machine is simulated, the probe's child replaced."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import llama_cpp
import pytest

from pyfly_cpp import DraftModel, FlyLlama, _native
from pyfly_cpp.errors import NativeError
from pyfly_cpp.machine import _extra_buffers_probe as probe
from pyfly_cpp.machine import extra_buffers

CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
RIGHT = "print('right')"
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
OPTIONS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1}
PROMPT = "Natalia sold clips to 48 of her friends in April"


class Machine:
    """A CPU with AMX and a llama.cpp that uses it, whose list of buffer types cannot be changed at first."""

    def __init__(self, monkeypatch, folder):
        self._monkeypatch = monkeypatch
        self.cache = folder / "pyfly-cpp" / "extra_buffers.json"
        self.cpu = {"model name": "Xeon", "flags": "fpu amx_bf16 amx_tile amx_int8"}
        self.has_library = True
        self.can_leave_out = False
        self.probed = []
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        monkeypatch.setenv("HOME", str(folder))
        monkeypatch.delenv(extra_buffers.VARIABLE, raising=False)
        monkeypatch.setattr(extra_buffers, "_library_has_amx", lambda: self.has_library)
        monkeypatch.setattr(extra_buffers, "_cpu", lambda: self.cpu)
        monkeypatch.setattr(_native, "leave_out", self.leave_out)
        self.child(CRASH)
        # Where the machine is a real one, the tests are guarded already.
        plain = llama_cpp.llama_cpp._lib.llama_model_default_params
        for module in (llama_cpp, llama_cpp.llama_cpp):
            monkeypatch.setattr(module, "llama_model_default_params", plain)

    def leave_out(self, name):
        assert name == "AMX"
        if not self.can_leave_out:
            raise NativeError("the kernels are not installed")

    def child(self, code, program=sys.executable):
        """What the probe runs from now on."""

        def command(library):
            self.probed.append(library)
            return [program, "-c", code]

        self._monkeypatch.setattr(extra_buffers, "_command", command)

    def new_process(self):
        extra_buffers.usable.cache_clear()
        extra_buffers.verdict.cache_clear()

    def verdict(self):
        """As a new process finds it."""
        self.new_process()
        return extra_buffers.verdict()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    amx = Machine(monkeypatch, tmp_path)
    amx.new_process()
    yield amx
    amx.new_process()


# ---- The verdict -----------------------------------------------------------------------------------------------------


def test_a_crash_is_noticed_and_remembered(machine):
    verdict = machine.verdict()
    assert not verdict.usable
    assert "AMX kernels crash" in verdict.reason
    assert 'CMAKE_ARGS="-DCMAKE_CXX_FLAGS=-fno-dse"' in verdict.remedy
    assert f"llama-cpp-python=={llama_cpp.__version__}" in verdict.remedy
    assert len(machine.probed) == 1
    assert machine.verdict() == verdict
    assert len(machine.probed) == 1
    assert os.listdir(machine.cache.parent) == [machine.cache.name]


def test_one_warning_in_a_process(machine):
    with pytest.warns(RuntimeWarning, match="-fno-dse") as caught:
        assert not extra_buffers.usable()
        assert not extra_buffers.usable()
    assert len(caught) == 1


@pytest.mark.parametrize("code", [CRASH, "print('wrong')", "print('?')"])
def test_amx_alone_is_left_out_where_that_is_possible(machine, code):
    machine.can_leave_out = True
    machine.child(code)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert extra_buffers.usable()
    verdict = machine.verdict()
    assert verdict.usable and verdict.remedy is None and "left out" in verdict.reason


def test_a_type_that_is_left_out_is_offered_to_no_model(quantised):
    """In a process of its own: nothing brings it back."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OUT, quantised[0]],
        capture_output=True,
        text=True,
        env={**os.environ, "PYFLY_KERNELS": "stock"},
    )
    assert done.returncode == 0, done.stderr
    if "CPU_REPACK model buffer" not in done.stderr.partition("left out")[0]:
        pytest.skip("llama.cpp repacks nothing here, or our kernels cannot be installed")
    assert "model buffer" in done.stderr.partition("left out")[2]
    assert "CPU_REPACK model buffer" not in done.stderr.partition("left out")[2]


def test_kernels_that_work_are_used(machine):
    machine.child(RIGHT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert extra_buffers.usable()
    assert machine.verdict().usable
    assert len(machine.probed) == 1


def test_wrong_products_are_no_better_than_a_crash(machine):
    machine.child("print('wrong')")
    verdict = machine.verdict()
    assert not verdict.usable
    assert "compute wrong products" in verdict.reason
    assert "-fno-dse" in verdict.remedy
    machine.verdict()
    assert len(machine.probed) == 1


@pytest.mark.parametrize("changed", ["library", "cpu"])
def test_another_library_or_cpu_is_probed_anew(machine, monkeypatch, tmp_path, changed):
    library = tmp_path / "libggml-cpu.so"
    library.write_bytes(b"compiled by GCC 12.2")
    monkeypatch.setattr(extra_buffers, "_library", lambda: library)
    assert not machine.verdict().usable
    machine.child(RIGHT)
    assert not machine.verdict().usable
    if changed == "library":
        library.write_bytes(b"compiled with -fno-dse")
    else:
        machine.cpu["model name"] = "Xeon 2"
    assert machine.verdict().usable
    assert machine.probed == [library, library]
    assert sorted(json.loads(machine.cache.read_text()).values()) == ["crashed", "right"]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import time; time.sleep(60)", "did not end within 0.2 seconds"),
        ("raise OSError", "ended with status 1"),
        ("", "ended with status 0"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended with status -9"),
        ("print('\\xff' * 1000)", "ended with status 0"),
    ],
)
def test_what_is_not_known_is_not_used_and_not_remembered(machine, monkeypatch, code, why):
    monkeypatch.setattr(extra_buffers, "_TIMEOUT", 0.2 if "sleep" in code else 20.0)
    machine.child(code)
    verdict = machine.verdict()
    assert not verdict.usable
    assert why in verdict.reason
    assert "PYFLY_EXTRA_BUFFERS=1" in verdict.remedy
    machine.child(RIGHT)
    assert machine.verdict().usable


@pytest.mark.parametrize("program", ["", "/nowhere/python"])
def test_a_probe_that_does_not_start(machine, program):
    machine.child("", program)
    assert "does not start" in machine.verdict().reason
    assert not machine.cache.exists()


def test_a_library_that_cannot_be_found(machine, monkeypatch):
    def gone():
        raise OSError("libggml-cpu.so is gone")

    monkeypatch.setattr(extra_buffers, "_library", gone)
    verdict = machine.verdict()
    assert not verdict.usable
    assert "libggml-cpu.so is gone" in verdict.reason


def test_without_permission_for_amx_there_is_nothing_to_fear(machine):
    """llama.cpp then offers no such buffers; not remembered, because the permission may come."""
    machine.child("print('absent')")
    assert machine.verdict().usable
    assert not machine.cache.exists()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"[1]", b"null", b'{"a": 5, "b": ["crashed"]}']
)
def test_a_damaged_memory_is_replaced(machine, content):
    machine.cache.parent.mkdir()
    machine.cache.write_bytes(content)
    assert not machine.verdict().usable
    assert list(json.loads(machine.cache.read_text()).values()) == ["crashed"]


def test_a_folder_that_cannot_be_written_means_probing_in_each_process(machine):
    machine.cache.parent.write_text("a file where the folder would be")
    assert not machine.verdict().usable
    assert not machine.verdict().usable
    assert len(machine.probed) == 2


@pytest.mark.parametrize("without", ["library", "cpu", "linux"])
def test_without_amx_nothing_is_read_or_started(machine, monkeypatch, without):
    def never(*_):
        raise AssertionError("asked for nothing")

    monkeypatch.setattr(extra_buffers, "_outcome", never)
    if without == "library":
        machine.has_library = False
    else:
        machine.cpu = {"model name": "Xeon", "flags": "fpu avx512f"} if without == "cpu" else {}
    assert machine.verdict().usable


@pytest.mark.parametrize(("wish", "used"), [("0", False), ("1", True)])
def test_the_variable_decides(machine, monkeypatch, wish, used):
    monkeypatch.setenv(extra_buffers.VARIABLE, wish)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert extra_buffers.usable() is used
    assert machine.probed == []


def test_a_wrong_variable_is_named(machine, monkeypatch, tiny_target):
    monkeypatch.setenv(extra_buffers.VARIABLE, "off")
    with pytest.raises(ValueError, match="PYFLY_EXTRA_BUFFERS is 'off'; set it to 0 or 1"):
        FlyLlama(tiny_target, verbose=False, **OPTIONS)


def test_this_machine_is_described():
    """/proc/cpuinfo as it is here, and the file that holds the CPU backend."""
    if not sys.platform.startswith("linux"):
        pytest.skip("AMX is looked for under Linux")
    if os.uname().machine == "x86_64":
        assert {"sse2", "fpu"} <= set(extra_buffers._cpu()["flags"].split())
        assert extra_buffers._cpu()["model name"]
    assert b"ggml_backend_cpu_reg" in extra_buffers._library().read_bytes()
    started = time.perf_counter()
    assert extra_buffers._probe(extra_buffers._library()) in ("absent", "right", "wrong", "crashed")
    assert time.perf_counter() - started < 10


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
    return FlyLlama(target, drafter=DraftModel(draft), verbose=False, adaptive=False, **OPTIONS)


def test_target_and_draft_do_without(machine, quantised, repacked):
    machine.child(RIGHT)
    llm, n = repacked(lambda: load_pair(quantised))
    llm.close()
    if n < 2:
        pytest.skip("llama.cpp does not repack Q4_0 on this CPU")
    machine.child(CRASH)
    machine.cache.unlink()
    machine.new_process()
    with pytest.warns(RuntimeWarning, match="-fno-dse") as caught:
        llm, n = repacked(lambda: load_pair(quantised))
    assert n == 0
    assert len(caught) == 1
    assert llm(PROMPT, max_tokens=8, temperature=0)["usage"]["completion_tokens"] == 8
    assert llm.stats.drafted > 0
    llm.close()


def test_plain_models_can_do_without_too(machine, quantised, repacked):
    machine.child(RIGHT)
    extra_buffers.guard_llama_cpp()
    assert llama_cpp.llama_model_default_params().use_extra_bufts
    machine.child(CRASH)
    machine.cache.unlink()
    machine.new_process()
    with pytest.warns(RuntimeWarning, match="-fno-dse"):
        extra_buffers.guard_llama_cpp()
    extra_buffers.guard_llama_cpp()
    assert not llama_cpp.llama_model_default_params().use_extra_bufts
    llm, n = repacked(lambda: llama_cpp.Llama(quantised[0], verbose=False, **OPTIONS))
    assert n == 0
    llm.close()


# ---- The probe -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ggml():
    return probe.load(str(extra_buffers._library()))


@pytest.fixture(scope="module")
def repack(ggml):
    buffer_type = probe.find_buffer_type(ggml, "CPU_REPACK")
    if buffer_type is None:
        pytest.skip("this llama.cpp repacks nothing")
    return buffer_type


def test_right_products_are_right(ggml, repack):
    if probe.probe(ggml, repack) == "absent":
        pytest.skip("llama.cpp repacks none of the probe's types on this CPU")
    assert probe.probe(ggml, repack) == "right"


@pytest.mark.parametrize("wrong", [0.0, float("nan"), 1.5, -1.0])
def test_wrong_products_are_noticed(ggml, repack, monkeypatch, wrong):
    """One row of a batch is enough."""
    plain = probe.Multiplier.product

    def product(self, buffer_type, kind, weights, rows):
        out = plain(self, self.plain, kind, weights, rows)
        if buffer_type == repack and len(out) > probe._N_OUT:
            out[-probe._N_OUT :] = type(out)("f", [wrong * value for value in out[-probe._N_OUT :]])
        return out

    monkeypatch.setattr(probe.Multiplier, "product", product)
    assert probe.probe(ggml, repack) == "wrong"


def test_a_product_that_is_placed_nowhere_says_nothing(ggml, repack, monkeypatch):
    monkeypatch.setattr(probe, "_TYPES", (1,))  # F16 is not repacked
    assert probe.probe(ggml, repack) == "absent"


def test_the_probe_as_it_is_run(monkeypatch):
    """The child itself, for a buffer type that is there and one that is not."""
    library = extra_buffers._library()
    command = extra_buffers._command(library)
    monkeypatch.setattr(extra_buffers, "_command", lambda _: [*command[:-1], "NONE"])
    assert extra_buffers._probe(library) == "absent"
    monkeypatch.setattr(extra_buffers, "_command", lambda _: [*command[:-1], "CPU_REPACK"])
    assert extra_buffers._probe(library) in ("right", "absent")
