"""The documentation: its Python runs, its links lead somewhere. Its commands are tried in
cli/test_documented_commands.py, what needs a server in serve/test_documented.py."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter

import pytest
from documents import DOCUMENTS, ROOT, all_blocks, fill, name

LANGUAGES = {"python": ("", "server", "not-run"), "bash": ("", "not-run"), "text": ("",), "ini": ("",), "yaml": ("",),
             "dockerfile": ("",)}  # fmt: skip

NOT_RUN = {
    "README.md": 3,  # installs, compiles
    "CONTRIBUTING.md": 1,  # installs
    "models/README.md": 1,  # fetches models
    "docs/evaluation.md": 3,  # lm_eval; hours
    "docs/heads.md": 1,  # llama.cpp's converter
    "docs/rpc.md": 5,  # needs RPC; compiles
    "docs/serving.md": 3,  # installs, docker, lm_eval
    "benchmarks/results/qwen2.5-coder-1.5b.md": 3,  # hours
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
