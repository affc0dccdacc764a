"""What model code may not do, by each way to contain it. A way that a system does not have is skipped with the
reason."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from pyfly_cpp.evaluation import sandbox
from pyfly_cpp.evaluation.sandbox import Limits, SandboxError, find_containment, run_program, uncontained_warning

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs Linux or macOS")

LIMITS = Limits(wall_seconds=60, cpu_seconds=30, memory_bytes=512 << 20)
"""Time is enough for a machine with busy neighbours, on which half a gigabyte of new pages may take two seconds."""
NATIVE = "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
"""Run without the audit hook: what is refused here is refused to native code, too."""


def require(way):
    try:
        return find_containment(way)
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["bubblewrap", "namespaces", "none"])
def run(request):
    """Runs a program, in each of the ways that there are."""
    require(request.param)

    def run(code, limits=LIMITS, audit_hook=True):
        return run_program(code, limits, request.param, audit_hook)

    return run


@pytest.fixture(params=["bubblewrap", "namespaces"])
def contained(request):
    """The same where something contains the program."""
    require(request.param)

    def run(code, limits=LIMITS, audit_hook=True):
        outcome = run_program(code, limits, request.param, audit_hook)
        assert "seccomp" in outcome.layers
        return outcome

    return run


@pytest.fixture
def sealed(run):
    """The same where there is seccomp."""
    if "seccomp" not in run("").layers:
        pytest.skip("this system has no seccomp, or no list for this machine")
    return run


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


def test_something_contains_programs_or_they_are_refused(monkeypatch):
    """On a system where one way works, `auto` takes it; where none does, nothing is run unless it is asked for."""
    try:
        layers = find_containment("auto")
    except SandboxError as error:
        assert "--containment none" in str(error)
    else:
        assert layers[0] in ("bubblewrap", "namespaces") and {"limits", "seccomp", "audit hook"} <= set(layers)
        assert run_program("").layers == layers and not uncontained_warning(layers)
    command = sandbox._command

    def nothing_works(way, *rest):
        if way == "none":
            return command(way, *rest)
        return [sys.executable, "-c", f"raise SystemExit('no {way} for you')"]

    monkeypatch.setattr(sandbox, "_command", nothing_works)
    find_containment.cache_clear()
    try:
        for wanted in ("auto", "bubblewrap", "namespaces"):
            with pytest.raises(SandboxError, match=r"(bubblewrap|namespaces): no .*--containment none"):
                run_program("", containment=wanted)
        assert run_program("", containment="none").passed
    finally:
        find_containment.cache_clear()


def test_bubblewrap_comes_first_where_it_works():
    require("bubblewrap")
    assert find_containment("auto")[0] == "bubblewrap"


def test_the_warning_says_what_is_not_contained():
    assert uncontained_warning(("bubblewrap", "limits", "seccomp")) == ""
    assert "can read your files" in uncontained_warning(("none", "limits", "seccomp", "audit hook"))
    assert "network" in uncontained_warning(("none", "limits", "audit hook"))
    assert "network" not in uncontained_warning(("none", "limits", "seccomp", "audit hook"))


# ---- Verdicts --------------------------------------------------------------------------------------------------------


def test_verdicts(run):
    assert run("assert 1 + 1 == 2").passed
    failed = run("x = 1\nassert x == 2, 'not two'")
    assert (failed.status, failed.detail) == ("failed", "AssertionError: not two (line 2)")
    assert run("def broken(:\n").status == "failed"
    assert run("x = '\udc80'").status == "failed" and run("x = '\0'").status == "failed"
    assert run("if __name__ == '__main__': raise KeyError('ran')").passed, "code_eval does not run it"


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


HUNT = """
import os, sys
found = {repr(getattr(sys, 'orig_argv', '')), repr(dict(os.environ)), repr(sys.argv)}
def look(thing, depth=0):
    if isinstance(thing, (str, bytes)):
        found.add(thing if isinstance(thing, str) else thing.decode('latin-1'))
    elif depth < 3 and isinstance(thing, (list, tuple, set, dict)):
        for entry in [*thing, *(thing.values() if isinstance(thing, dict) else ())]: look(entry, depth + 1)
frame = sys._getframe()
while frame:
    look(dict(frame.f_locals)), look(frame.f_globals), look(frame.f_code.co_consts)
    frame = frame.f_back
try:
    import gc
    for thing in gc.get_objects(): look(thing)
    frame = sys._getframe()
    while frame:
        look(gc.get_referents(frame))
        frame = frame.f_back
except Exception: pass
for n in range(64):
    for place in (f'/proc/self/fd/{n}', n):
        try:
            if isinstance(place, int): os.lseek(place, 0, 0)
            with open(place, 'rb', closefd=False if isinstance(place, int) else True) as file:
                found.add(file.read(1 << 16).decode('latin-1'))
        except Exception: pass
for name in ('cmdline', 'environ'):
    try: found.add(open(f'/proc/self/{name}').read())
    except Exception: pass
try:
    with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb') as memory:
        for line in maps:
            start, end = (int(n, 16) for n in line.split()[0].split('-'))
            if ' rw' in line: memory.seek(start); found.add(memory.read(end - start).decode('latin-1'))
except OSError: pass
import re
secrets = {word for text in found for word in re.findall('[0-9a-f]{32}', text)}
for secret in secrets:
    for n in range(64):
        try:
            os.lseek(n, 0, 0); os.ftruncate(n, 0); os.write(n, secret.encode())
        except OSError: pass
    try: os.lseek(3, 0, 0)
    except OSError: pass
os._exit(len(secrets))
"""


def test_the_secret_cannot_be_found(run):
    """All that Python shows of its process is searched; a guard that kept the secret in a variable fails this test."""
    outcome = run(HUNT)
    assert (outcome.status, outcome.detail) == ("exited", "the program ended early with status 0")


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
        b"pyfly-sandbox-ready limits,seccomp\n",
        b"",
    ],
)
@pytest.mark.parametrize("end", ["os._exit(0)", "", "assert False"])
def test_what_a_program_says_of_itself_is_no_pass(said, end):
    """Written to every descriptor, before a program ends early or by itself: never a pass, never an exception."""
    code = f"import os\nfor n in range(64):\n    try: os.write(n, {said!r})\n    except OSError: pass\n{end}"
    outcome = run_program(code, LIMITS, "none")
    assert outcome.passed == (end == "" and said == b"")
    assert outcome.layers and len(outcome.detail) <= 400


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
        "os.fchmod(n, 0)",
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


def test_memory_outside_of_the_address_space(contained):
    """System V and POSIX shared memory and memory files count towards no limit of a process."""
    code = NATIVE + (
        "assert libc.shmget(0, 1 << 20, 0o1600) == -1 and ctypes.get_errno() == errno.ENOSYS\n"
        "assert libc.semget(0, 1, 0o1600) == -1 and libc.msgget(0, 0o1600) == -1\n"
        "assert libc.memfd_create(b'x', 0) == -1\n"
        "shm_open = getattr(libc, 'shm_open', None) or ctypes.CDLL('librt.so.1').shm_open\n"
        "assert shm_open(b'/pyfly-test', 0o102, 0o600) == -1\n"
    )
    outcome = contained(code, audit_hook=False)
    assert outcome.passed, outcome
    outcome = contained("from multiprocessing.shared_memory import SharedMemory\nSharedMemory(create=True, size=9)")
    assert outcome.status == "failed", outcome


def test_large_files(run):
    assert not run("with open('big', 'wb') as f:\n    for _ in range(64): f.write(bytes(1 << 20))").passed


def test_many_files(contained):
    many = "for i in range(64):\n    with open(str(i), 'wb') as f: f.write(bytes(4 << 20))"
    assert not contained(many).passed


def test_endless_output_does_not_fill_anything(run):
    assert run("while True: print('x' * 10000)", Limits(wall_seconds=0.5)).status == "timeout"


def test_crashes(run):
    assert run("def f(): return f()\nf()").status == "failed"
    assert run("import ctypes\nctypes.string_at(0)", audit_hook=False).status == "crashed"


# ---- Processes and the network ---------------------------------------------------------------------------------------


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
        "import ctypes\nctypes.CDLL(None)",
        "import socket\nsocket.socket()",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')",
        "import socket\nsocket.create_connection(('127.0.0.1', 9))",
        "import socket\nsocket.getaddrinfo('example.org', 80)",
    ],
)
def test_python_refuses_with_a_reason(code):
    outcome = run_program(code, LIMITS, "none")
    assert outcome.status == "failed" and "sandbox forbids" in outcome.detail


def test_no_processes_and_no_sockets(sealed):
    code = NATIVE + (
        "for _ in range(9): assert libc.fork() == -1\nassert libc.vfork() == -1 and libc.system(b'true') != 0\n"
        "assert libc.socket(2, 1, 0) == -1 and libc.socket(1, 1, 0) == -1 and libc.unshare(1 << 28) == -1\n"
        "assert libc.prctl(1, 0, 0, 0, 0) == -1 and libc.setsid() == -1 and libc.setpgid(0, 0) == -1\n"
        "assert libc.mount(None, b'/', None, 32, None) == -1 and libc.ptrace(0, 0, 0, 0) == -1\n"
    )
    outcome = sealed(code, audit_hook=False)
    assert outcome.passed, outcome


def test_other_processes_cannot_be_reached(sealed):
    """By their limits, their owner's signals, or plain signals: the caller of this very test would be hit."""
    code = (
        "import fcntl, os, resource, signal\ndef refused(call, *arguments):\n"
        "    try: call(*arguments)\n    except (OSError, ValueError): return True\n"
        f"victim = {os.getpid()}\n"
        "r, w = os.pipe()\n"
        "for pid in {victim, os.getppid() or victim}:\n"
        "    assert refused(resource.prlimit, pid, resource.RLIMIT_CPU, (1, 1))\n"
        "    assert refused(resource.prlimit, pid, resource.RLIMIT_CPU)\n"
        "    assert refused(os.kill, pid, 0) and refused(os.sched_setaffinity, pid, {0})\n"
        "    assert refused(fcntl.fcntl, r, fcntl.F_SETOWN, pid) and refused(os.setpriority, 0, pid, 5)\n"
        "assert refused(fcntl.fcntl, r, 10, signal.SIGKILL)\n"  # F_SETSIG
        "assert refused(fcntl.ioctl, r, 0x8901, b'xxxx')\n"  # FIOSETOWN
        "assert refused(resource.setrlimit, resource.RLIMIT_CPU, (1 << 20, 1 << 20))\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (64, 64)\n"
    )
    outcome = sealed(code, audit_hook=False)
    assert outcome.passed, outcome


def test_nothing_survives(run):
    limits = unlike_others(0.3)
    for code in ("import time; time.sleep(60)", "import os\nos.fork()"):
        run(code, limits)
    assert_nothing_is_left(limits)


@pytest.mark.parametrize("way", ["bubblewrap", "namespaces", "none"])
def test_a_program_ends_with_a_killed_evaluation(way):
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux ends a process with its parent")
    require(way)
    code = "from pyfly_cpp.evaluation.sandbox import Limits, run_program\n"
    limits = unlike_others(60)
    code += f"run_program('import time; time.sleep(60)', Limits(wall_seconds={limits.wall_seconds}), {way!r})"
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


def test_writing_elsewhere(run, victim):
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
        outcome = run(code)
        assert outcome.status == "failed" or ("bubblewrap" in outcome.layers and "symlink" in code), (code, outcome)


def test_file_metadata_elsewhere(sealed, victim):
    """By path, by descriptor, by the descriptor of a folder."""
    code = (
        "import os\n"
        f"path, folder = {str(victim)!r}, {str(victim.parent)!r}\n"
        "def refused(call, *arguments, **named):\n    try: call(*arguments, **named)\n    except OSError: return True\n"
        "assert refused(os.chmod, path, 0) and refused(os.utime, path, (0, 0))\n"
        "assert refused(os.setxattr, path, 'user.x', b'1') and refused(os.chown, path, os.getuid(), -1)\n"
        "try: file, place = os.open(path, os.O_RDONLY), os.open(folder, os.O_RDONLY)\n"
        "except FileNotFoundError: file = None\n"
        "if file is not None:\n"
        "    assert refused(os.chmod, file, 0) and refused(os.utime, file, (0, 0))\n"
        "    assert refused(os.setxattr, file, 'user.x', b'1')\n"
        "    assert refused(os.chmod, 'victim.txt', 0, dir_fd=place)\n"
        "    assert refused(os.utime, 'victim.txt', (0, 0), dir_fd=place)\n"
    )
    outcome = sealed(code, audit_hook=False)
    assert outcome.passed, outcome


def test_writing_elsewhere_by_native_code(contained, victim):
    code = NATIVE + (
        f"path, new = {str(victim).encode()!r}, {str(victim.parent / 'new').encode()!r}\n"
        "for flags in (0o1, 0o2, 0o1001, 0o1000): assert libc.open(path, flags, 0o600) == -1, flags\n"
        "assert libc.truncate(path, 0) == -1 and libc.unlink(path) == -1 and libc.mkdir(new, 0o700) == -1\n"
        "assert libc.open(new, 0o101, 0o600) == -1 and libc.symlink(b'x', new) == -1\n"
        "assert libc.rename(path, b'mine') == -1 and libc.link(path, b'mine') == -1\n"
        "assert libc.mknod(new, 4480, 0) == -1\n"
        "assert libc.open(b'/dev/zero', 0) == -1, 'no devices'\n"
        "assert libc.open(b'mine', 0o101, 0o600) >= 0 and libc.open(b'/dev/null', 2) >= 0\n"
    )
    outcome = contained(code, audit_hook=False)
    assert outcome.passed, outcome


def test_other_files_are_not_even_there_under_bubblewrap(victim):
    require("bubblewrap")
    assert run_program(f"import os\nassert not os.path.exists({str(victim)!r})", LIMITS, "bubblewrap").passed


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
    assert run(
        f"import os\n{mess}", Limits(wall_seconds=30), audit_hook=False
    ).passed  # whose look at long paths takes long
    assert list(tmp_path.iterdir()) == []
