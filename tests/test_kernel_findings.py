"""What is found about our kernels, by a program of its own, and kept: also if that program crashes or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pyfly_cpp import _native
from pyfly_cpp.errors import NativeError
from pyfly_cpp.machine import kernel_findings as findings
from pyfly_cpp.machine import kernel_trial
from pyfly_cpp.machine.cache import cache_folder

ALL = (*_native.kernel_types(), findings.ATTENTION)
RIGHT = f"print({json.dumps(json.dumps({'right': ALL}))}, flush=True)"


@pytest.fixture(autouse=True)
def looks_of_the_product(monkeypatch):
    """Not those of the other tests (conftest.py)."""
    monkeypatch.setattr(findings, "_LOOKS", 2)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Nothing is known yet."""
    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(_native, "enable_kernels", lambda: None)
    return cache_folder()


@pytest.fixture
def program(monkeypatch):
    def set_program(*lines):
        code = "import json, os, signal, sys, time\n" + "\n".join(lines)
        monkeypatch.setattr(findings, "_PROGRAM", ("-c", code))

    return set_program


def says(**what):
    return f"print({json.dumps(what)!r}, flush=True)"


def test_what_is_right_is_used_and_found_once(program):
    program(RIGHT, says(slower=[]))
    assert findings.is_untried()
    assert findings.find().used == set(ALL)
    assert not findings.is_untried()
    program("sys.exit('a second trial')")
    assert findings.find().used == set(ALL)


def test_what_is_wrong_is_not_used(program):
    program(says(right=ALL[1:]), says(slower=[]))
    assert findings.find().used == set(ALL[1:])


@pytest.mark.parametrize("again", ["slower", "faster", "nobody knows"])
def test_one_slow_moment_is_not_for_ever(again, program, monkeypatch):
    now = [1e9]
    monkeypatch.setattr(findings.time, "time", lambda: now[0])
    program(RIGHT, says(slower=ALL[:2]))
    assert findings.find().used == set(ALL)
    program("sys.exit('too early')")
    assert findings.find().used == set(ALL)
    now[0] += 3600
    assert findings.find().used == set(ALL)  # it fails, and is tried another time
    last = {"slower": says(slower=ALL[:1]), "faster": says(slower=[]), "nobody knows": ""}[again]
    program("assert len(sys.argv) == 3", says(right=ALL[:2]), last)
    assert findings.find().used == set(ALL[1:] if again == "slower" else ALL)
    program("sys.exit('a third look')")
    now[0] += 3600
    assert findings.find().used == set(ALL[1:] if again == "slower" else ALL)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_is_a_sentence(moment, program, folder):
    """Whatever was right before."""
    program(RIGHT if moment == "after" else "", "os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.warns(RuntimeWarning, match=r"crashed \(SIGSEGV\)"):
        first = findings.find()
    program("sys.exit('a second trial')")
    assert findings.find() == first
    assert not first.used and str(folder / "kernels.json") in first.why_not
    (folder / "kernels.json").unlink()
    program(RIGHT, says(slower=[]))
    assert findings.find().used == set(ALL)


def test_a_hang_is_a_sentence(program, monkeypatch):
    monkeypatch.setattr(findings, "_SECONDS", 0.5)
    program("time.sleep(600)")
    with pytest.warns(RuntimeWarning, match="did not end"):
        assert not findings.find().used
    program("sys.exit('a second trial')")
    assert not findings.find().used


def test_times_that_take_too_long_are_left_out(program, monkeypatch):
    monkeypatch.setattr(findings, "_SECONDS", 3)
    program(RIGHT, "time.sleep(600)")
    assert findings.find().used == set(ALL)


@pytest.mark.parametrize("end", ["sys.exit('no memory')", "os.kill(os.getpid(), signal.SIGKILL)", "raise ImportError"])
def test_what_says_nothing_of_the_kernels_is_not_kept(end, program):
    program(end)
    found = findings.find()
    assert not found.used and found.why_not
    program(RIGHT, says(slower=[]))
    assert findings.find().used == set(ALL)


def test_without_a_program_nothing_is_tried(program, monkeypatch):
    program("")
    monkeypatch.setattr(sys, "executable", "")
    assert "no process" in findings.find().why_not


def test_the_program_finds_what_this_process_imports(program, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    program("import only_here", RIGHT, says(slower=[]))
    assert findings.find().used == set(ALL)


def test_a_layout_that_is_not_known_is_kept(program):
    program(says(why_not="the structures are not known"))
    with pytest.warns(RuntimeWarning, match="not known"):
        findings.find()
    program("sys.exit('a second trial')")
    assert "not known" in findings.find().why_not


def test_a_library_that_was_changed_meanwhile_is_noticed(program, monkeypatch):
    """The program tried another one: what this process loaded is looked at."""
    program(RIGHT, says(slower=[]))
    assert findings.find().used

    def refuse():
        raise NativeError("called in a way that is not known.")

    monkeypatch.setattr(_native, "enable_kernels", refuse)
    found = findings.find()
    assert not found.used and "not known" in found.why_not


ENDED = f"""
import os, signal, sys
from pyfly_cpp.machine import kernel_findings as findings
from pyfly_cpp import _native
end = "os.kill(os.{{}}(), signal.SIGKILL)"
trial = end.format("getppid") if sys.argv[1] == "trying" else {RIGHT!r}
findings._PROGRAM = ("-c", "import os, signal; " + trial)
_native.enable_kernels = lambda: exec(end.format("getpid"))
print(findings.find().why_not)
"""


def end_while(what):
    """A first start that ends while the kernels are "trying" or "enabling"."""
    command = [sys.executable, "-c", ENDED, what]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_process_that_ends_while_they_are_enabled(program, folder):
    """Once may have another reason. After the second time nothing is tried, so no third start ends."""
    assert end_while("enabling").returncode < 0
    assert end_while("enabling").returncode < 0
    third = end_while("enabling")
    assert third.returncode == 0 and "ended each time" in third.stdout and "kernels.json" in third.stdout
    (folder / "kernels.json").unlink()
    assert end_while("enabling").returncode < 0
    program(RIGHT, says(slower=[]))
    assert findings.find().used == set(ALL)
    assert findings.find().begun == 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_process_that_is_ended_while_they_are_tried_proves_nothing(program):
    """The trial is a process of its own, so whatever ends this one was no kernel of ours: Ctrl-C while a model loads,
    or somebody's limit of time."""
    for _ in range(3):
        assert end_while("trying").returncode < 0
    program(RIGHT, says(slower=[]))
    assert findings.find().used == set(ALL)


def test_an_interrupt_is_no_finding(program):
    for _ in range(3):
        program("os.kill(os.getppid(), signal.SIGINT); time.sleep(60)")
        with pytest.raises(KeyboardInterrupt):
            findings.find()
    program(RIGHT, says(slower=[]))
    assert findings.find().used == set(ALL)


def test_processes_that_start_together_try_once(tmp_path):
    """The others wait for it."""
    log = tmp_path / "log"
    trial = f"import time\nopen({str(log)!r}, 'a').write('x')\ntime.sleep(1)\n{RIGHT}\n{says(slower=[])}"
    code = f"""
from pyfly_cpp.machine import kernel_findings as findings
findings._PROGRAM = ("-c", {trial!r})
print(len(findings.find().used))
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in processes] == [str(len(ALL))] * 3
    assert log.read_text() == "x"


def test_a_folder_that_cannot_be_written(program, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path / "file"))
    program(RIGHT, says(slower=[]))
    assert findings.find().used == set(ALL)


@pytest.mark.parametrize(
    "entry", ['{"right": [99], "slower": []}', "[1]", '{"right": 1}', "null", "{", '{"types": [2]}']
)
def test_a_damaged_file_is_tried_again(entry, program, folder):
    folder.mkdir(parents=True)
    (folder / "kernels.json").write_text(f'{{"{findings._key()}": {entry}}}')
    program(RIGHT, says(slower=[]))
    assert findings.find().used == set(ALL)


def test_another_build_of_ggml_is_tried_anew(program, monkeypatch):
    program(RIGHT, says(slower=[]))
    assert findings.find().used
    monkeypatch.setattr(_native, "ggml_build", lambda: "0.99.9 abcdef")
    program(says(right=[]), says(slower=[]))
    assert not findings.find().used


# ---- The program -----------------------------------------------------------------------------------------------------


def printed(capsys):
    said = {}
    for line in capsys.readouterr().out.splitlines():
        said.update(json.loads(line))
    return said


@pytest.mark.parametrize("fault", ["wrong", "slow", "refused", None])
def test_the_program_finds_what_is_wrong_or_slow(fault, capsys, monkeypatch):
    def trial(*arguments, is_ours):
        if fault == "refused" and is_ours:
            raise NativeError("ggml could not compute a graph to try the kernels")
        return _native.KernelTrial(
            0.1 if fault == "wrong" else 0.0, (2.0 if fault == "slow" else 0.5) if is_ours else 1.0
        )

    monkeypatch.setattr(_native, "try_kernels", trial)
    monkeypatch.setattr(_native, "try_attention", trial)
    kernel_trial.run([])
    f32 = 0  # needs no speed
    assert printed(capsys) == {
        "right": [] if fault in ("wrong", "refused") else list(ALL),
        "slower": [one for one in ALL if one != f32] if fault == "slow" else [],
    }
    if fault is None:
        kernel_trial.run([2, findings.ATTENTION])
        assert printed(capsys)["right"] == [2, findings.ATTENTION]


def test_the_program_says_why_there_is_nothing_to_try(capsys, monkeypatch):
    def refuse():
        raise NativeError("this processor has no AVX2.")

    monkeypatch.setattr(_native, "enable_kernels", refuse)
    kernel_trial.run([])
    assert printed(capsys) == {"why_not": "this processor has no AVX2"}


@pytest.mark.skipif(not _native.kernel_types(), reason="no kernels for this processor")
def test_the_program_itself(monkeypatch):
    monkeypatch.undo()
    command = [sys.executable, *findings._PROGRAM, "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=True)
    assert '{"right": [2]}' in done.stdout, done.stderr
