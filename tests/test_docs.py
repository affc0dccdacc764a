"""The documentation: its Python runs, its links lead somewhere. Its commands are tried in
cli/test_documented_commands.py, what needs a server in serve/test_documented.py."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT, all_blocks, fill, name

import pyfly_cpp
from pyfly_cpp.decoding import drafters, gates
from pyfly_cpp.engine import stats

LANGUAGES = {"python": ("", "server", "not-run"), "bash": ("", "not-run"), "text": ("",), "ini": ("",), "yaml": ("",),
             "dockerfile": ("",)}  # fmt: skip

NOT_RUN = {
    "README.md": 1,  # installs, compiles
    "CONTRIBUTING.md": 4,  # installs; a browser
    "models/README.md": 1,  # fetches models
    "docs/installing.md": 7,  # installs, compiles, removes
    "docs/drafters.md": 1,  # llama.cpp's converter
    "docs/measuring.md": 1,  # lm_eval
    "docs/training-heads.md": 1,  # hours
    "docs/rpc.md": 2,  # needs RPC
    "docs/serving.md": 2,  # installs; docker
    "docs/design/serving.md": 1,  # installs
    "benchmarks/results/looseness.md": 1,  # an hour
    "benchmarks/results/qwen2.5-coder-1.5b.md": 1,  # hours
}
"""Blocks that no test runs. Their commands are parsed all the same."""


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_code_stands_in_fences_that_say_what_it_is(path):
    inside = None
    for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.match(r"( *)```(.*)", line)
        if fence and inside is None:
            inside = fence[1]
            language, _, marker = fence[2].partition(" ")
            assert marker in LANGUAGES.get(language, ()), f"line {i}: what is {fence[2]!r}?"
        elif inside is not None:
            inside = None if line == f"{inside}```" else inside
        else:
            assert not line.startswith("    "), f"line {i} is code without a fence"
    assert inside is None


def test_what_is_not_run_is_listed():
    assert Counter(name(block.path) for block in all_blocks() if block.marker == "not-run") == NOT_RUN


@pytest.mark.parametrize("block", [b for b in all_blocks("python") if b.marker == ""], ids=str)
def test_python_runs(block, tmp_path, monkeypatch, tiny_target, tiny_draft):
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


def lines_of_mypy(folder):
    """The file and line of each error."""
    cache = ROOT / ".mypy_cache" / "documents"  # the first run takes a quarter of a minute
    options = ["--config-file=", f"--cache-dir={cache}", "--follow-imports=silent", "--ignore-missing-imports"]
    options += ["--no-error-summary", "--python-executable", sys.executable]
    command = [sys.executable, "-m", "mypy", *options, *sorted(file.name for file in folder.glob("*.py"))]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert not done.stderr
    lines = [line.split(":") for line in done.stdout.splitlines() if ": error:" in line]
    return [(name, int(line)) for name, line, *_ in lines]


def lines_of_pyright(folder):
    """The same."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [(Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in found if one["severity"] == "error"]


@pytest.mark.parametrize("checker, lines", [("mypy", lines_of_mypy), ("pyright", lines_of_pyright)])
def test_type_checkers_accept_the_python(tmp_path, checker, lines):
    """As somebody's own code, with a checker's usual settings."""
    pytest.importorskip(checker)
    written = {}
    for i, block in enumerate(all_blocks("python")):
        file = tmp_path / f"block_{i}.py"
        file.write_text(block.text, encoding="utf-8")
        written[file.name] = block
    (tmp_path / "wrong.py").write_text(
        "from pyfly_cpp import FlyLlama\n"
        "llm = FlyLlama('x.gguf')\n"
        "llm.create_chat_completion(messages=[], max_token=5)\n"
        "llm('x', temperature='hot')\n"
    )
    found = sorted(lines(tmp_path))
    assert found == [("wrong.py", 3), ("wrong.py", 4)], [f"{written.get(name, name)}: {line}" for name, line in found]


@pytest.mark.parametrize("block", [b for b in all_blocks("python") if b.marker == "not-run"], ids=str)
def test_python_that_is_not_run_names_what_exists(block):
    """Its imports, and the arguments of what it imports."""
    tree = ast.parse(block.text)
    namespace = {}
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(imports, []), str(block), "exec"), namespace)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert calls
    for call in calls:
        kinds = namespace[call.func.id].__mro__[:-1]
        known = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
        assert {keyword.arg for keyword in call.keywords} <= known, ast.unparse(call)


def test_messages_that_troubleshooting_quotes_are_those_of_the_program():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("## It fails")[2]
    quoted = re.findall(r'"([^"]+)"', "".join(re.findall(r"^\|[^|]*\|", text, re.MULTILINE)))
    assert quoted
    files = [*(ROOT / "pyfly_cpp").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    sources = re.sub(r'"\s*f?"', "", "".join(path.read_text(encoding="utf-8") for path in files))
    for part in (part for message in quoted for part in re.split(r"\b[NM]\b", message) if part.strip()):
        assert part in sources, part


def anchors(path):
    """The anchors of a document's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", head).lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "benchmarks" / "README.md"], ids=name)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


@pytest.mark.slow
def test_pages_of_the_python_api(tmp_path):
    """They are built without a warning, and have every public name and what its docstring says."""
    pytest.importorskip("pdoc")
    built = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "docs" / "api" / "build.py", tmp_path], capture_output=True, text=True
    )
    assert built.returncode == 0 and not built.stderr, built.stderr
    page = (tmp_path / "pyfly_cpp.html").read_text(encoding="utf-8")
    for public in {*pyfly_cpp.__all__} - {"kernels"}:
        assert f'<section id="{public}">' in page, public
    for attribute in ("FlyLlama.records", "FlyLlama.stats", "FlyBatch.submit", "Window.rule", "Margin.tau"):
        assert f'<div id="{attribute}" class="classattr">' in page, attribute
    assert "Margin.nodes" not in page  # what the core alone reads is left out
    for module in ("decoding/gates", "decoding/presets", "engine/stats", "machine/kernels"):
        assert f"pyfly_cpp/{module}.html" in page and (tmp_path / "pyfly_cpp" / f"{module}.html").exists()


def test_names_that_the_pages_leave_out_exist():
    template = (ROOT / "docs" / "api" / "module.html.jinja2").read_text(encoding="utf-8")
    lists = re.findall(r"set for_\w+ = \[(.*?)\]", template, re.DOTALL)
    hidden = re.findall(r'"(\w+)"', " ".join(lists))
    rooms = (pyfly_cpp, gates, drafters, stats)
    kinds = [kind for room in rooms for kind in vars(room).values() if isinstance(kind, type)]
    assert hidden and [word for word in hidden if not any(hasattr(kind, word) for kind in kinds)] == []


def test_public_names_have_a_docstring():
    docs = {public: getattr(pyfly_cpp, public).__doc__ for public in pyfly_cpp.__all__}
    assert [public for public, doc in docs.items() if not doc or doc.startswith(f"{public}(")] == []
    errors = [public for public in docs if public.endswith("Error")]
    overview = re.findall(r"`(\w+)`", pyfly_cpp.__doc__)
    assert {*docs} - {*errors} - {*overview} == set(), "not in the overview at the top of pyfly_cpp/__init__.py"
