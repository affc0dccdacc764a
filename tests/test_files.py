"""Files are written whole or not at all, by one process at a time."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

from pyfly_cpp.machine.conditions import describe_model
from pyfly_cpp.machine.files import OutputError, files_of_model, only_writer, require_free, write_atomically
from pyfly_cpp.machine.memory import bytes_of_model


def test_atomic_writes(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_text_that_is_not_utf8_is_written_as_json_can_hold_it(tmp_path):
    write_atomically(tmp_path / "a.json", json.dumps({"file": "caf\udce9"}, ensure_ascii=False))
    assert json.loads((tmp_path / "a.json").read_bytes()) == {"file": "caf\udce9"}


def test_a_neighbour_of_a_similar_name_is_left_alone(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "a.json.tmp").symlink_to(victim)
    (tmp_path / ".a.json.tmp").write_text("precious")
    write_atomically(tmp_path / "a.json", "new")
    assert victim.read_text() == (tmp_path / ".a.json.tmp").read_text() == "precious"
    assert (tmp_path / "a.json").read_text() == "new" and (tmp_path / "a.json.tmp").is_symlink()


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "a.json", "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_permissions_are_the_umasks_or_those_of_the_file(tmp_path):
    path = tmp_path / "a.json"
    before = os.umask(0o027)
    try:
        write_atomically(path, "new")
        assert path.stat().st_mode & 0o777 == 0o640
        path.chmod(0o600)
        write_atomically(path, "newer")
        assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_the_umask_of_the_process_stays(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "umask")
    write_atomically(tmp_path / "a.json", "new")


def test_a_model_has_all_its_parts_and_no_others(tmp_path):
    for name in ("m[1]", "m[1]-chat"):
        for i in (1, 2, 3):
            (tmp_path / f"{name}-0000{i}-of-00003.gguf").write_bytes(f"{name}{i}".encode())
    parts = files_of_model(tmp_path / "m[1]-00001-of-00003.gguf")
    assert [part.name for part in parts] == [f"m[1]-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert bytes_of_model(parts[1]) == 15
    assert describe_model(parts[0]) == {
        "file": parts[0].name, "bytes": 15, "sha256": hashlib.sha256(b"m[1]1m[1]2m[1]3").hexdigest(),
    }  # fmt: skip
    assert files_of_model(tmp_path / "m.gguf") == []


def test_a_name_as_long_as_names_may_be(tmp_path):
    path = tmp_path / ("a" * 255)
    write_atomically(path, "new")
    assert path.read_text() == "new"
    with pytest.raises(OutputError, match="cannot be written"):
        require_free(tmp_path / ("a" * 300), force=False)


@pytest.mark.skipif(os.name != "posix", reason="named pipes")
def test_what_is_no_file_is_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, what in (("pipe", "device"), ("folder", "folder")):
        with pytest.raises(OutputError, match=f"is a {what}"):
            write_atomically(tmp_path / name, "new")
        with pytest.raises(OutputError, match=f"is a {what}"):
            require_free(tmp_path / name, force=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "pipe"]


def test_the_folder_is_not_made_up(tmp_path):
    with pytest.raises(OutputError, match="cannot be written"):
        write_atomically(tmp_path / "no" / "a.json", "new")
    assert not list(tmp_path.iterdir())


HOLD = """import sys, time
from pyfly_cpp.machine.files import only_writer
with only_writer(sys.argv[1]): print(flush=True); time.sleep(60)
"""


def test_one_writer_at_a_time_and_a_killed_one_blocks_nobody(tmp_path):
    lock = tmp_path / "lock"
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        with pytest.raises(OutputError, match="another process is writing"), only_writer(lock):
            pass
        n_waits = 0

        def wait():
            nonlocal n_waits
            n_waits += 1
            if n_waits == 3:
                child.kill()

        with only_writer(lock, wait):
            assert n_waits >= 3
            with pytest.raises(OutputError), only_writer(lock):
                pass
        assert not lock.exists()
    finally:
        child.kill()
        child.wait()


def test_many_writers_in_turn(tmp_path):
    """Each removes the lock file at its end; a waiting one must not be content with the file that was removed."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    code = (
        "import sys, pyfly_cpp.machine.files as f\n"
        "for _ in range(50):\n"
        "    with f.only_writer(sys.argv[1] + '/lock', lambda: None):\n"
        "        n = int(open(sys.argv[1] + '/counter').read()) + 1\n"
        "        open(sys.argv[1] + '/counter', 'w').write(str(n))\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
    assert counter.read_text() == "200" and [path.name for path in tmp_path.iterdir()] == ["counter"]
