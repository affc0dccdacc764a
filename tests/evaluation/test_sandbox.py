"""What model code may not do. Where a layer is missing on a system, the test of that layer is skipped with the
reason."""

from __future__ import annotations

import os
import sys
import time

import pytest

from pyfly_cpp.evaluation.sandbox import Limits, SandboxError, available_layers, run_program

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs Linux or macOS")

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a Linux mechanism")
SHORT = Limits(wall_seconds=5, cpu_seconds=2, memory_bytes=512 << 20)


def needs(layer):
    if layer not in available_layers():
        pytest.skip(f"this system has no {layer} (it has {', '.join(available_layers())})")


def leftovers():
    """Processes that came from a sandbox and still live."""
    out = []
    if os.path.isdir("/proc"):
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    with open(f"/proc/{entry}/cmdline", "rb") as file:
                        if b"_sandbox_guard" in file.read():
                            out.append(int(entry))
                except OSError:
                    pass
    return out


def test_verdicts():
    assert run_program("assert 1 + 1 == 2", SHORT).passed
    failed = run_program("x = 1\nassert x == 2, 'not two'", SHORT)
    assert (failed.status, failed.detail) == ("failed", "AssertionError: not two (line 2)")
    assert run_program("def broken(:\n", SHORT).status == "failed"
    assert run_program("if __name__ == '__main__': raise KeyError('ran')", SHORT).passed, "code_eval does not run it"
    assert {"limits", "audit"} <= set(available_layers())


@pytest.mark.parametrize(
    "code", ["import sys; sys.exit(0)", "exit()", "raise SystemExit", "import os; os._exit(0)", "quit()"]
)
def test_leaving_early_is_no_pass(code):
    assert run_program(f"{code}\nassert False", SHORT).status in ("failed", "exited")


def test_a_printed_or_written_verdict_is_no_pass():
    verdict = '{"status": "passed", "token": "x", "layers": []}'
    fake = f"import os\nos.write(3, {verdict!r}.encode())\nos._exit(0)"
    assert not run_program(fake, SHORT).passed


def test_sleeping():
    started = time.monotonic()
    assert run_program("import time\ntime.sleep(60)", Limits(wall_seconds=1)).status == "timeout"
    assert time.monotonic() - started < 4


def test_busy_loop():
    started = time.monotonic()
    assert run_program("while True: pass", Limits(wall_seconds=30, cpu_seconds=1)).status == "timeout"
    assert time.monotonic() - started < 15


def test_ignoring_signals_does_not_help():
    code = "import signal\nfor n in (1, 2, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass"
    assert run_program(code, Limits(wall_seconds=2, cpu_seconds=30)).status == "timeout"


@linux
def test_endless_allocation():
    assert run_program("x = []\nwhile True: x.append(bytearray(1 << 24))", SHORT).status == "memory"
    assert run_program("x = 'a' * (1 << 40)", SHORT).status == "memory"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.fork()",
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.system('true') == 0 or exit(1)\nraise RuntimeError('a shell ran')",
        "import multiprocessing\np = multiprocessing.Process(target=print)\np.start()",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
    ],
)
def test_no_new_processes(code):
    outcome = run_program(code, SHORT)
    assert outcome.status == "failed" and "sandbox forbids" in outcome.detail


@linux
def test_no_new_processes_under_the_audit_hook():
    needs("seccomp")
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None)\nfor _ in range(50):\n    assert libc.fork() == -1\n"
        "assert libc.vfork() == -1\nassert libc.system(b'true') != 0"
    )
    assert run_program(code, SHORT).passed
    assert run_program("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()", SHORT).passed


@pytest.mark.parametrize(
    "code",
    [
        "import socket\nsocket.socket()",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')",
        "import socket\nsocket.create_connection(('127.0.0.1', 9))",
        "import socket\nsocket.getaddrinfo('example.org', 80)",
    ],
)
def test_no_sockets(code):
    outcome = run_program(code, SHORT)
    assert outcome.status == "failed" and "forbids" in outcome.detail


@linux
def test_no_sockets_under_the_audit_hook():
    needs("seccomp")
    assert run_program("import ctypes\nassert ctypes.CDLL(None).socket(2, 1, 0) == -1", SHORT).passed
    assert run_program("import ctypes\nassert ctypes.CDLL(None).socket(1, 1, 0) == -1", SHORT).passed


def test_writing_elsewhere(tmp_path):
    victim = tmp_path / "victim.txt"
    victim.write_text("kept")
    tries = [
        f"open({str(victim)!r}, 'w').write('gone')",
        f"open({str(victim)!r}, 'r+').write('gone')",
        f"import os\nos.remove({str(victim)!r})",
        f"import os\nos.rename({str(victim)!r}, 'mine')",
        f"import os\nos.open({str(victim)!r}, os.O_WRONLY | os.O_TRUNC)",
        f"import shutil\nshutil.rmtree({str(tmp_path)!r})",
        f"import pathlib\npathlib.Path({str(tmp_path / 'new')!r}).mkdir()",
        f"import os\nos.symlink({str(victim)!r}, 'link')\nopen('link', 'w').write('gone')",
        f"import os\nos.chmod({str(victim)!r}, 0)",
    ]
    for code in tries:
        assert run_program(code, SHORT).status == "failed", code
    assert victim.read_text() == "kept" and [entry.name for entry in tmp_path.iterdir()] == ["victim.txt"]


@linux
def test_writing_elsewhere_under_the_audit_hook(tmp_path):
    needs("namespaces")
    victim = tmp_path / "victim.txt"
    victim.write_text("kept")
    code = (
        f"import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.open({str(victim).encode()!r}, 0o1001, 0o600) == -1\n"
        f"assert libc.unlink({str(victim).encode()!r}) == -1\nassert libc.mount(None, b'/', None, 32, None) == -1\n"
        "assert libc.open(b'mine', 0o101, 0o600) >= 0"
    )
    outcome = run_program(code, SHORT)
    assert outcome.passed, outcome
    assert victim.read_text() == "kept"


@linux
def test_writing_elsewhere_without_namespaces(tmp_path):
    needs("landlock")
    limits = Limits(wall_seconds=5, cpu_seconds=2, namespaces=False)
    victim = tmp_path / "victim.txt"
    victim.write_text("kept")
    code = (
        f"import ctypes\nlibc = ctypes.CDLL(None)\n"
        f"path, new = {str(victim).encode()!r}, {str(tmp_path / 'new').encode()!r}\n"
        "assert libc.open(path, 1) == -1 and libc.truncate(path, 0) == -1 and libc.unlink(path) == -1\n"
        "assert libc.open(new, 0o101, 0o600) == -1 and libc.mkdir(new, 0o700) == -1 and libc.symlink(b'x', new) == -1\n"
        "assert libc.rename(path, b'mine') == -1 and libc.link(path, b'mine') == -1\n"
        "assert libc.open(b'mine', 0o101, 0o600) >= 0 and libc.open(b'/dev/null', 1) >= 0"
    )
    outcome = run_program(code, limits)
    assert outcome.passed, outcome
    assert victim.read_text() == "kept" and [entry.name for entry in tmp_path.iterdir()] == ["victim.txt"]


def test_the_work_folder_works_and_is_thrown_away():
    code = "import os\nopen('a.txt', 'w').write('hello')\nassert open('a.txt').read() == 'hello'\n"
    code += "assert os.listdir() == ['a.txt']"
    assert run_program(code, SHORT).passed
    assert run_program(code, SHORT).passed, "nothing is left of the run before"


def test_large_files():
    outcome = run_program("with open('big', 'wb') as f:\n    for _ in range(64): f.write(bytes(1 << 20))", SHORT)
    assert not outcome.passed
    needs("namespaces")
    many = "for i in range(64):\n    with open(str(i), 'wb') as f: f.write(bytes(4 << 20))"
    assert not run_program(many, SHORT).passed


def test_the_environment_is_not_handed_on(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "x")
    assert run_program("import os\nassert 'MY_SECRET' not in os.environ", SHORT).passed
    assert run_program("import sys\nassert 'numpy' not in sys.modules and 'pyfly_cpp' not in sys.modules", SHORT).passed


def test_endless_output_does_not_fill_anything():
    assert run_program("while True: print('x' * 10000)", Limits(wall_seconds=2, cpu_seconds=1)).status == "timeout"


def test_deep_recursion_and_crashes():
    assert run_program("def f(): return f()\nf()", SHORT).status == "failed"
    assert run_program("import ctypes\nctypes.string_at(0)", SHORT).status == "crashed"


@linux
def test_nothing_survives():
    for code in ("import time; time.sleep(60)", "while True: pass", "import os\nos.fork()"):
        run_program(code, Limits(wall_seconds=0.5))
    deadline = time.monotonic() + 3
    while leftovers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers() == []


@linux
def test_the_group_and_the_parent_cannot_be_left():
    needs("seccomp")
    leaving = "import os\n{}\nopen('left', 'w')"
    assert run_program(leaving.format("os.setsid()"), SHORT).status == "failed"
    assert run_program(leaving.format("os.setpgid(0, 0)"), SHORT).status == "failed"
    assert run_program("import ctypes\nassert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == -1", SHORT).passed


@linux
def test_requiring_namespaces():
    limits = Limits(require_namespaces=True)
    if "namespaces" in available_layers():
        assert run_program("", limits).passed
    else:
        with pytest.raises(SandboxError, match="permits no namespaces"):
            run_program("", limits)


@linux
def test_without_namespaces_the_other_layers_hold(tmp_path):
    limits = Limits(wall_seconds=5, cpu_seconds=2, namespaces=False)
    outcome = run_program("", limits)
    assert outcome.passed and "namespaces" not in outcome.layers
    assert run_program(f"open({str(tmp_path / 'x')!r}, 'w')", limits).status == "failed"
    assert run_program("import socket\nsocket.socket()", limits).status == "failed"
    assert run_program("import os\nos.fork()", limits).status == "failed"
