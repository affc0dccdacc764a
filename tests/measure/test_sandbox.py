"""Programs that a model wrote: verdicts, limits, and what bubblewrap keeps from them. Without bubblewrap, what needs it
is skipped with the reason."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from pyfly_cpp.measure.tasks import sandbox
from pyfly_cpp.measure.tasks.sandbox import Limits, SandboxError, require_containment, run_program

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs Linux or macOS")

LIMITS = Limits(wall_seconds=60, cpu_seconds=30, memory_bytes=512 << 20)
"""Time is enough for a machine with busy neighbours, on which half a gigabyte of new pages may take two seconds."""
NATIVE = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"


@pytest.fixture
def contained():
    """Runs a program under bubblewrap."""
    try:
        require_containment()
    except SandboxError as error:
        pytest.skip(str(error))
    return lambda code, limits=LIMITS: run_program(code, limits)


@pytest.fixture(params=["bubblewrap", "none"])
def run(request):
    """Runs a program, in each of the ways that there are."""
    if request.param == "bubblewrap":
        return request.getfixturevalue("contained")
    return lambda code, limits=LIMITS: run_program(code, limits, "none")


def leftovers(limits):
    """Processes that came from a sandbox with these very limits and still live."""
    out = []
    if os.path.isdir("/proc"):
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    with open(f"/proc/{entry}/cmdline", "rb") as file:
                        if f'"wall_seconds": {limits.wall_seconds}'.encode() in file.read():
                            out.append(int(entry))
                except OSError:
                    pass
    return out


def unlike_others(seconds):
    return Limits(wall_seconds=seconds + random.SystemRandom().random() / 100)


def assert_nothing_is_left(limits):
    deadline = time.monotonic() + 3
    while leftovers(limits) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers(limits) == []


# ---- What contains a program -----------------------------------------------------------------------------------------


def refusal(containment="bubblewrap"):
    require_containment.cache_clear()
    try:
        with pytest.raises(SandboxError) as failure:
            require_containment(containment)
    finally:
        require_containment.cache_clear()
    assert "install bubblewrap" in str(failure.value) and "--containment none" in str(failure.value)
    return str(failure.value)


def stand_in(monkeypatch, folder, script):
    """A `bwrap` on the path."""
    path = folder / "bwrap"
    path.write_text(f"#!{sys.executable}\nimport os, sys\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_without_bubblewrap_nothing_is_run_unless_it_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "bwrap is not installed" in refusal()
    with pytest.raises(SandboxError):
        run_program("")
    require_containment("none")
    assert run_program("", LIMITS, "none").passed


def test_a_bubblewrap_that_does_not_work_is_refused(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, "sys.exit('bwrap: No permissions to create new namespace')")
    assert "No permissions to create new namespace" in refusal()
    stand_in(monkeypatch, tmp_path, "sys.exit(1)")
    assert "an empty program ends with" in refusal()


def test_what_bubblewrap_is_told(monkeypatch, tmp_path):
    """By a stand-in that notes its options and runs the command outside."""
    script = f"""
end = sys.argv.index("--")
open({str(tmp_path / "options")!r}, "w").write("\\n".join(sys.argv[1:end]))
command = [{str(sandbox._PROGRAM)!r} if one == "/limited.py" else one for one in sys.argv[end + 1 :]]
os.execv(command[0], command)"""
    stand_in(monkeypatch, tmp_path, script)
    monkeypatch.setattr(sandbox, "_INSIDE", str(tmp_path))
    assert run_program("assert 1 + 1 == 2", LIMITS).passed
    assert run_program("assert 1 + 1 == 3", LIMITS).status == "failed"
    options = (tmp_path / "options").read_text().split("\n")
    assert {"--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--remount-ro"} <= set(options)
    binds = [options[i + 1] for i, one in enumerate(options) if one.endswith(("bind", "bind-try"))]
    assert str(sandbox._PROGRAM) in binds and not {"/", "/home", "/root", os.path.expanduser("~")} & set(binds)


# ---- Verdicts --------------------------------------------------------------------------------------------------------


def test_verdicts(run):
    assert run("assert 1 + 1 == 2").passed
    failed = run("x = 1\nassert x == 2, 'not two'")
    assert (failed.status, failed.detail) == ("failed", "AssertionError: not two (line 2)")
    assert run("def broken(:\n").status == "failed"
    assert run("x = '\udc80'").status == "failed" and run("x = '\0'").status == "failed"
    assert run("if __name__ == '__main__': raise KeyError('ran')").passed, "code_eval does not run it"


@pytest.mark.parametrize(
    ("code", "passes"),
    [
        ("def first(xs: List[int]): return xs[0]", False),
        ("def f(x: int): pass\nassert f.__annotations__['x'] is int", True),
        (
            "from dataclasses import dataclass\nfrom typing import ClassVar\n@dataclass\nclass P:\n"
            "    n: ClassVar[int] = 0\n    x: int = 1\nassert P(5).x == 5",
            True,
        ),
    ],
    ids=["a forgotten import", "types", "a class variable"],
)
def test_annotations_are_evaluated_as_in_a_file_of_its_own(run, code, passes):
    assert run(code).passed == (passes or sys.version_info >= (3, 14))  # where annotations wait until they are read


def test_what_exercises_do_works(run):
    code = (
        "import collections, dataclasses, datetime, decimal, fractions, functools, heapq, itertools, json, math, os,"
        " random, re, statistics, string, sys, tempfile, threading, time, typing, unittest, uuid, zoneinfo\n"
        "open('a', 'w').write('hello')\nos.rename('a', 'b')\nassert open('b').read() == 'hello'\nos.mkdir('c')\n"
        "with tempfile.TemporaryDirectory() as folder: open(folder + '/x', 'wb').write(bytes(9))\n"
        "threads = [threading.Thread(target=time.sleep, args=(0.01,)) for _ in range(8)]\n"
        "[thread.start() for thread in threads]\n[thread.join() for thread in threads]\n"
        "print(input) or sys.stdout.flush()\nopen(os.devnull, 'w').write('x')\nassert sys.stdin.read() == ''\n"
        "assert sorted(os.listdir()) == ['b', 'c'] and os.urandom(8) != os.urandom(8)\nsys.setrecursionlimit(5000)\n"
    )
    assert run(code).passed
    assert run(code).passed, "nothing is left of the run before"


def test_file_modes_work_where_other_files_are_kept_apart(contained):
    assert contained("import os, shutil\nopen('a', 'w').close()\nos.chmod('a', 0o600)\nshutil.copy2('a', 'b')").passed


@pytest.mark.parametrize(
    "code", ["import sys; sys.exit(0)", "exit()", "raise SystemExit", "import os; os._exit(0)", "quit()"]
)
def test_leaving_early_is_no_pass(run, code):
    assert run(f"{code}\nassert False").status in ("failed", "exited")


@pytest.mark.parametrize(
    "said",
    [
        b'{"status": "passed", "token": "x", "layers": []}',
        b'{"layers":5}',
        b"[" * 50_000,
        b"failed\n" + b"\xff\xed\xa0\x80" * 1000,
        b"memory",
        b"passed",
        b"0" * 32,
        b"9" * 100_000,
        b"NaN",
        b"",
    ],
)
@pytest.mark.parametrize("end", ["os._exit(0)", "", "assert False"])
def test_what_a_program_says_of_itself_is_no_pass(said, end):
    """Written to every descriptor, before a program ends early or by itself: never a pass, never an exception."""
    code = f"import os\nfor n in range(64):\n    try: os.write(n, {said!r})\n    except OSError: pass\n{end}"
    outcome = run_program(code, LIMITS, "none")
    assert outcome.passed == (end == "" and said == b"")
    assert len(outcome.detail) <= 400


@pytest.mark.parametrize("seed", range(4))
def test_fuzz(seed):
    """Random treatment of every descriptor and a random end; the evaluation always gets a verdict that is text."""
    rng = random.Random(seed)
    deeds = [
        "os.write(n, random.randbytes(random.choice([1, 31, 32, 33, 4096])))",
        "os.write(n, b'failed\\n' + random.randbytes(900))",
        "os.ftruncate(n, random.choice([0, 1, 32, 1 << 20]))",
        "os.lseek(n, random.choice([0, 7, 1 << 40]), 0)",
        "os.close(n)",
        "os.dup2(n, random.randrange(64))",
        "os.set_blocking(n, False)",
        "os.write(n, str(10 ** 4000).encode())",
    ]
    ends = [
        "",
        "os._exit({})",
        "raise ValueError('\\ud800' * 400)",
        "raise type('X\\ud800', (Exception,), {{}})(1e999)",
    ]
    ends += ["class E(Exception):\n    def __str__(self): return self.__str__()\nraise E", "assert False, float('nan')"]
    ends += ["import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\nwhile True: pass", "exec('(' * 5000)"]
    for _ in range(8):
        lines = [f"try: {rng.choice(deeds)}\n    except (OSError, ValueError): pass" for _ in range(rng.randrange(5))]
        body = "\n    ".join(lines or ["pass"])
        code = f"import os, random\nrandom.seed({rng.random()})\nfor n in range(64):\n    {body}\n"
        code += rng.choice(ends).format(rng.randrange(256))
        outcome = run_program(code, LIMITS, "none")
        assert outcome.status in ("passed", "failed", "exited", "crashed", "memory", "timeout"), code
        assert not outcome.passed or "os.write" not in code, code
        outcome.detail.encode("utf-8")


# ---- Time and memory -------------------------------------------------------------------------------------------------


def test_sleeping(run):
    started = time.monotonic()
    assert run("import time\ntime.sleep(60)", Limits(wall_seconds=0.5)).status == "timeout"
    assert time.monotonic() - started < 4


def test_busy_loop(run):
    started = time.monotonic()
    assert run("while True: pass", Limits(wall_seconds=30, cpu_seconds=1)).status == "timeout"
    assert time.monotonic() - started < 15


def test_ignoring_signals_does_not_help(run):
    code = "import signal\nfor n in (1, 2, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass"
    assert run(code, Limits(wall_seconds=0.5, cpu_seconds=30)).status == "timeout"


def test_endless_allocation(run):
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux limits the address space")
    assert run("x = []\nwhile True: x.append(bytearray(1 << 24))").status == "memory"
    assert run("x = 'a' * (1 << 40)").status == "memory"


def test_large_files(run):
    assert not run("with open('big', 'wb') as f:\n    for _ in range(64): f.write(bytes(1 << 20))").passed


def test_many_files(contained):
    many = "for i in range(64):\n    with open(str(i), 'wb') as f: f.write(bytes(4 << 20))"
    assert not contained(many).passed


def test_endless_output_does_not_fill_anything(run):
    assert run("while True: print('x' * 10000)", Limits(wall_seconds=0.5)).status == "timeout"


def test_crashes(run):
    assert run("def f(): return f()\nf()").status == "failed"
    assert run("import ctypes\nctypes.string_at(0)").status == "crashed"


# ---- Processes and the network ---------------------------------------------------------------------------------------


def test_no_network_and_no_other_process(contained):
    code = (
        "import os, socket\nfor family in (socket.AF_INET, socket.AF_INET6):\n"
        "    try: socket.socket(family).connect_ex(('127.0.0.1', 9))\n    except OSError: pass\n"
        "assert [name for _, name in socket.if_nameindex()] == ['lo']\n"
        f"victim = {os.getpid()}\n"
        "try: os.kill(victim, 0)\nexcept (ProcessLookupError, PermissionError): pass\n"
        "else: assert victim < 10, 'another process was reached'\n"
    )
    assert contained(code).passed


def test_no_way_to_more_rights(contained):
    code = NATIVE + (
        "assert libc.mount(None, b'/', None, 32, None) == -1 and libc.umount2(b'/tmp', 2) == -1\n"
        "assert libc.setuid(0) == -1\nimport os\nassert os.getuid() == 65534\n"
    )
    assert contained(code).passed


def test_nothing_survives(contained):
    limits = unlike_others(0.3)
    for code in ("import time; time.sleep(60)", "import os, time\nos.fork() or os.setsid() or time.sleep(60)"):
        contained(code, limits)
    assert_nothing_is_left(limits)


def test_a_program_ends_with_a_killed_evaluation(contained):
    code = "from pyfly_cpp.measure.tasks.sandbox import Limits, run_program\n"
    limits = unlike_others(60)
    code += f"run_program('import time; time.sleep(60)', Limits(wall_seconds={limits.wall_seconds}))"
    evaluation = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 20
        while not leftovers(limits) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.3)
        assert leftovers(limits)
    finally:
        evaluation.send_signal(signal.SIGKILL)
        evaluation.wait()
    assert_nothing_is_left(limits)


# ---- Files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path):
    """A file that must stay as it is."""
    path = tmp_path / "victim.txt"
    path.write_text("kept")
    before = path.stat()
    yield path
    after = path.stat()
    assert path.read_text() == "kept" and [entry.name for entry in tmp_path.iterdir()] == ["victim.txt"]
    assert (before.st_mode, before.st_mtime_ns, before.st_nlink) == (after.st_mode, after.st_mtime_ns, after.st_nlink)


def test_writing_elsewhere(contained, victim):
    folder = victim.parent
    tries = [
        f"open({str(victim)!r}, 'w').write('gone')",
        f"open({str(victim)!r}, 'r+').write('gone')",
        f"import os\nos.remove({str(victim)!r})",
        f"import os\nos.rename({str(victim)!r}, 'mine')",
        f"import os\nos.open({str(victim)!r}, os.O_WRONLY | os.O_TRUNC)",
        f"import shutil\nshutil.rmtree({str(folder)!r})",
        f"import pathlib\npathlib.Path({str(folder / 'new')!r}).mkdir()",
        f"import os\nos.symlink({str(victim)!r}, 'link')\nopen('link', 'w').write('gone')",
        f"import os\nos.chdir({str(folder)!r})\nopen('victim.txt', 'w').write('gone')",
        f"import os\nos.chmod({str(victim)!r}, 0)",
        f"import os\nos.utime({str(victim)!r}, (0, 0))",
    ]
    for code in tries:
        contained(code)  # a folder of the same name may be made in its own /tmp: the fixture looks at the file


def test_other_files_are_not_even_there(contained, victim):
    hidden = [str(victim), os.path.expanduser("~/.ssh"), "/etc/passwd", "/proc/self", "/sys", "/dev/zero"]
    assert contained(f"import os\nfor path in {hidden!r}: assert not os.path.exists(path), path").passed


def test_next_to_the_interpreter_nothing_else_is_there(contained):
    """Its prefix may be a whole home folder."""
    if sys.base_prefix.startswith(("/usr", "/nix", "/gnu")):
        pytest.skip("the system's own interpreter")
    places = [entry.path for entry in os.scandir(sys.base_prefix) if entry.name not in ("lib", "lib64", "bin")]
    python = os.path.realpath(sys.executable)
    places += [entry.path for entry in os.scandir(os.path.dirname(python)) if entry.path != python]
    assert places and contained(f"import os\nfor path in {places!r}: assert not os.path.exists(path), path").passed


def test_the_system_is_read_only(contained):
    places = ["/x", "/usr/x", "/limited.py", os.path.join(sys.base_prefix, "x")]
    code = (
        f"for path in {places!r}:\n    try: open(path, 'w')\n    except OSError: pass\n"
        "    else: raise AssertionError(path)\n"
    )
    assert contained(code).passed


def test_the_environment_is_not_handed_on(run, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "x")
    assert run("import os\nassert 'MY_SECRET' not in os.environ").passed
    assert run("import sys\nassert 'numpy' not in sys.modules and 'pyfly_cpp' not in sys.modules").passed


@pytest.mark.parametrize(
    "mess",
    [
        "for _ in range(3000): os.mkdir('d'); os.chdir('d')",
        "os.mkdir('d'); open('d/x', 'w').close(); os.umask(0o777); os.mkdir('d/e'); os.mkdir('closed')",
        "os.symlink('loop', 'loop'); os.symlink('nowhere', 'x'); open('a\\nb\\udcff -rf', 'w').close()",
    ],
)
def test_any_mess_is_thrown_away(run, mess, monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    assert run(f"import os\n{mess}", Limits(wall_seconds=30)).passed
    assert list(tmp_path.iterdir()) == []
