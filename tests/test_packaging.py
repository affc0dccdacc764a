"""What sdist and wheel hold, and the workflow that makes the wheels."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

import pytest

import pyfly_cpp

ROOT = Path(__file__).parents[1]
NOT_IN_SDIST = (".ci/", ".github/", ".gitignore", ".clang-format")
LLAMA = ("libllama", "libggml")


def tracked(*arguments):
    """What git knows of this checkout."""
    try:
        done = subprocess.run(["git", "ls-files", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git checkout")
    return set(done.stdout.splitlines())


def test_what_the_sdist_holds(tmp_path):
    pytest.importorskip("scikit_build_core")
    expected = {name for name in tracked() if (ROOT / name).is_file()}
    expected = {name for name in expected if not name.startswith(NOT_IN_SDIST) and not name.endswith(".gguf")}
    build = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.iterdir()
    assert archive.name.startswith("pyfly_cpp-")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    new = tracked("--others", "--exclude-standard")  # of somebody who is at work here
    assert names - new == expected - new | {"PKG-INFO"}


@pytest.mark.skipif(sys.version_info < (3, 10), reason="sys.stdlib_module_names came with 3.10")
def test_what_is_imported_is_declared():
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    declared = declared.partition("[project.scripts]")[0]
    declared += (ROOT / "csrc" / "build_support" / "llama_cpp_python.py").read_text(encoding="utf-8")
    names = {name.replace("-", "_").removesuffix("_python") for name in re.findall(r'"([\w-]+)(?:[>=]=|")', declared)}
    names.add("pydantic_core")  # pydantic requires one release of it
    imported = set()
    for path in (ROOT / "pyfly_cpp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).partition(".")[0])
    assert imported - sys.stdlib_module_names - {"pyfly_cpp"} - names == set()


def test_what_the_wheel_holds():
    """The wheel that was installed, as its own list has it."""
    if Path(pyfly_cpp.__file__).parents[1] == ROOT:
        pytest.skip("pyfly_cpp is imported from its sources here, not from a wheel")
    files = importlib.metadata.files("pyfly-cpp") or []
    names = {PurePosixPath(file).as_posix() for file in files if "__pycache__" not in file.parts}
    (extension,) = {name for name in names if name.startswith("pyfly_cpp/_pyfly.")}
    assert ".abi3." in extension or extension.endswith(".pyd")
    package = {name for name in names if name.startswith("pyfly_cpp/")}
    assert package - {extension} == {name for name in tracked("pyfly_cpp") if (ROOT / name).is_file()}
    rest = {name for name in names - package if not name.split("/")[0].endswith(".dist-info")}
    assert {PurePosixPath(name).stem for name in rest} == {"pyfly-cpp"}, "the command, and nothing else"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    metadata = importlib.metadata.metadata("pyfly-cpp")
    pinned = f"llama-cpp-python=={importlib.metadata.version('llama-cpp-python')}"
    assert pinned in metadata.get_all("Requires-Dist"), "it fits the release it was compiled against alone"


def test_hints_can_be_pasted_into_zsh():
    """It takes brackets without quotes for a pattern."""
    sources = [path for path in (ROOT / "pyfly_cpp").rglob("*.py") if path.is_file()]
    bare = [path.name for path in sources if re.search(r"pip install [^'\"]*\w\[", path.read_text(encoding="utf-8"))]
    assert not bare


def test_an_extra_can_be_added_to_what_is_installed():
    """As messages advise: pip takes the installed pyfly-cpp, so it does not matter where that came from."""
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--no-index", "pyfly-cpp[cli]"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
