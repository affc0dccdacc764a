"""Limits of containers and services: control groups of both versions, as a system shows them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pyfly_cpp.machine import groups, memory, threads
from pyfly_cpp.machine.groups import cpu_quota, free_memory

GIB = 2**30
V1_UNLIMITED = 9223372036854771712


class System:
    """A made-up root folder with proc and control groups."""

    def __init__(self, root):
        self.root = root
        self.lines = {"cgroup": [], "mountinfo": ["22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw"]}

    def mount(self, kind, place, top, controllers, path):
        n = len(self.lines["mountinfo"])
        options = "rw" if kind == "cgroup2" else f"rw,{controllers}"
        self.lines["mountinfo"].append(f"{30 + n} 22 0:{n} {top} {place} rw,nosuid shared:9 - {kind} cgroup {options}")
        self.lines["cgroup"].append(f"{0 if kind == 'cgroup2' else n}:{controllers}:{path}")
        for name, lines in self.lines.items():
            self.write(f"/proc/self/{name}", "\n".join(lines) + "\n")

    def write(self, path, content):
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(content))

    def group(self, folder, **files):
        for name, content in files.items():
            self.write(f"{folder}/{name.replace('__', '.')}", content)


@pytest.fixture
def system(tmp_path):
    return System(tmp_path)


def test_a_system_without_groups_has_no_limits(system):
    assert free_memory(system.root) is None
    assert cpu_quota(system.root) is None


def test_the_limits_of_a_service_are_below_the_mounted_group(system):
    """MemoryMax= and CPUQuota= of systemd, and those of the slice that the service is in: the tightest holds."""
    top, slice_ = "/sys/fs/cgroup", "/sys/fs/cgroup/system.slice"
    system.mount("cgroup2", top, "/", "", "/system.slice/pyfly.service")
    system.group(f"{slice_}/pyfly.service", memory__max=8 * GIB, memory__high="max", memory__current=GIB,
                 memory__stat=f"anon 5\ninactive_file {GIB // 4}\nactive_file {GIB // 4}\n",
                 cpu__max="max 100000")  # fmt: skip
    assert free_memory(system.root) == 7 * GIB + GIB // 2  # files make room
    assert cpu_quota(system.root) is None
    system.group(slice_, memory__max=4 * GIB, memory__current=3 * GIB, memory__stat="", cpu__max="150000 100000")
    assert free_memory(system.root) == GIB
    assert cpu_quota(system.root) == 1.5
    system.group(f"{slice_}/pyfly.service", memory__high=GIB + GIB // 2, cpu__max="50000 100000")
    assert free_memory(system.root) == GIB  # high slows down as max ends: 1.5 GiB - 1 GiB + files
    assert cpu_quota(system.root) == 0.5


def test_version_1_has_a_hierarchy_for_each_controller(system):
    system.mount("cgroup", "/sys/fs/cgroup/cpu,cpuacct", "/", "cpu,cpuacct", "/a")
    system.mount("cgroup", "/sys/fs/cgroup/memory", "/", "memory", "/a/b")
    system.mount("cgroup2", "/sys/fs/cgroup/unified", "/", "", "/")
    system.group("/sys/fs/cgroup/memory/a/b", memory__limit_in_bytes=V1_UNLIMITED, memory__usage_in_bytes=0)
    system.group("/sys/fs/cgroup/cpu,cpuacct/a", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert (free_memory(system.root), cpu_quota(system.root)) == (None, None)
    stat = f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file 0\n"
    limited = {"memory__limit_in_bytes": 3 * GIB, "memory__usage_in_bytes": 2 * GIB, "memory__stat": stat}
    system.group("/sys/fs/cgroup/memory/a", **limited)
    system.group("/sys/fs/cgroup/cpu,cpuacct", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    assert (free_memory(system.root), cpu_quota(system.root)) == (2 * GIB, 2.5)


@pytest.mark.parametrize("top, path", [("/docker/x", "/docker/x"), ("/", "/docker/x"), ("/", "/../../other")])
def test_a_container_sees_its_own_group_alone(system, top, path):
    """Without a namespace of groups the path is that of the host; with one of somebody else's it leads out."""
    system.mount("cgroup", "/sys/fs/cgroup/memory", top, "memory", path)
    system.group("/sys/fs/cgroup/memory", memory__limit_in_bytes=GIB, memory__usage_in_bytes=0)
    assert free_memory(system.root) == GIB


def test_what_uses_more_than_its_limit_has_nothing_free(system):
    system.mount("cgroup2", "/sys/fs/cgroup", "/", "", "/")
    system.group("/sys/fs/cgroup", memory__max=GIB, memory__current=2 * GIB)
    assert free_memory(system.root) == 0


def test_files_that_are_not_understood_are_no_limits(system):
    system.mount("cgroup2", "/sys/fs/cgroup", "/", "", "/")
    system.group("/sys/fs/cgroup", memory__max="??", memory__current="", memory__stat="x\n\n", cpu__max="1")
    system.write("/proc/self/mountinfo", (system.root / "proc/self/mountinfo").read_text() + "\nx - cgroup2\n - \n")
    assert (free_memory(system.root), cpu_quota(system.root)) == (None, None)
    system.group("/sys/fs/cgroup", cpu__max="100000 0")
    assert cpu_quota(system.root) is None


@pytest.mark.parametrize("quota, n", [(None, 4), (0.1, 1), (1.0, 1), (1.5, 1), (1.8, 2), (3.0, 3), (64.0, 4)])
def test_threads_are_counted_by_the_quota(monkeypatch, quota, n):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(threads, "_linux_cores", lambda: 4)
    monkeypatch.setattr(groups, "cpu_quota", lambda: quota)
    assert threads.physical_cores() == n
    filled = {}
    threads.fill_thread_counts(filled)
    assert filled == {"n_threads": n, "n_threads_batch": n}


def test_the_free_memory_is_that_of_the_group(monkeypatch):
    monkeypatch.setattr(groups, "free_memory", lambda: 12345)
    assert memory.available() == 12345
    monkeypatch.setattr(groups, "free_memory", lambda: 2**60)
    assert memory.available() < 2**60


def _made(candidates):
    """A new group of this system with this file, if one can be made here."""
    for base, file in candidates:
        folder = Path(base, f"pyfly-test-{os.getpid()}")
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / file).exists():
            return folder
        folder.rmdir()
    pytest.skip("no control group can be made here")


def _told_in(folder, code):
    enter = f"open({str(folder / 'cgroup.procs')!r}, 'w').write('0')"
    try:
        done = subprocess.run([sys.executable, "-c", f"{enter}\n{code}"], capture_output=True, text=True, check=True)
        return done.stdout
    finally:
        time.sleep(0.1)  # the process has left it a moment later
        folder.rmdir()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="control groups are Linux's")
def test_a_real_group_limits_this_process():
    folder = _made([("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")])
    name = next(n for n in ("memory.max", "memory.limit_in_bytes") if (folder / n).exists())
    (folder / name).write_text(str(GIB))
    assert 0 < int(_told_in(folder, "from pyfly_cpp.machine import memory; print(memory.available())")) <= GIB
    folder = _made([("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us"), ("/sys/fs/cgroup", "cpu.max")])
    is_v2 = (folder / "cpu.max").exists()
    (folder / ("cpu.max" if is_v2 else "cpu.cfs_quota_us")).write_text("100000 100000" if is_v2 else "100000")
    assert _told_in(folder, "from pyfly_cpp.machine.threads import physical_cores as n; print(n())").strip() == "1"
