"""The shape of the package: imports that point one way."""

from __future__ import annotations

import ast
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pyfly_cpp

ROOT = Path(pyfly_cpp.__file__).parent
FILES = {
    ".".join(("pyfly_cpp", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


def imported(name):
    """The modules of the package that this one imports, anywhere in it."""
    out = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            wanted = [f"{node.module}.{alias.name}" for alias in node.names]
            out |= {module if module in FILES else node.module for module in wanted}
        elif isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
    return {module for module in out if module in FILES and module != name}


def test_no_circle():
    graph = {name: imported(name) for name in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


ROOMS = (
    ("_version", "errors"),
    ("ranges",),
    ("_native",),
    ("machine",),
    ("models", "grammar"),
    ("decoding",),
    ("engine",),
    ("llama",),
    ("measure", "serve", "heads"),
    ("cli",),
    ("__main__",),
)
"""The rooms at the top of the package; each imports only what stands above it."""


def test_imports_point_one_way():
    floor = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
    for name in FILES:
        if name == "pyfly_cpp":
            continue
        room = room_of(name)
        for module in imported(name):
            assert module != "pyfly_cpp", f"{name} imports what pyfly_cpp exports, which is for others"
            other = room_of(module)
            assert other == room or floor[other] < floor[room], f"{name} imports {module}"


OF_LLAMA_CPP = {
    "_chat_handlers", "_convert_completion_to_chat", "_convert_completion_to_chat_function", "_ctx", "_grammar",
    "_init_sampler", "_input_ids", "_is_hybrid", "_is_recurrent", "_logits_all", "_lora_adapter", "_model", "_n_ctx",
    "_requires_eval", "_seed", "_stack",
}  # fmt: skip
"""Private names of llama_cpp, which the room `llama` alone may read."""
OF_PYTHON = {"_is_owned", "_replace", "_asdict", "_fields", "_fields_", "_exit"}


def room_of(name):
    return name.split(".")[1] if "." in name else ""


def test_no_private_attribute_of_another_room():
    own = {}
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
            found = node.attr if is_self else getattr(node, "name", None)
            if isinstance(found, str):
                own.setdefault(room_of(name), set()).add(found)
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                known = own[room_of(name)] | OF_PYTHON | (OF_LLAMA_CPP if room_of(name) == "llama" else set())
                assert node.attr in known, f"{name} reaches for {node.attr}"


def test_the_native_side_knows_only_the_errors():
    for name in FILES:
        if name.startswith("pyfly_cpp._native"):
            strangers = {m for m in imported(name) if not m.startswith("pyfly_cpp._native")}
            assert strangers <= {"pyfly_cpp.errors"}, name


def test_only_its_own_folder_includes_llama_cpp():
    csrc = Path(__file__).parents[1] / "csrc"
    for path in (*csrc.rglob("*.h"), *csrc.rglob("*.cpp")):
        if "llama" not in path.relative_to(csrc).parts:
            found = re.findall(r'#include ["<]((?:llama|ggml|gguf)[^">]*)', path.read_text(encoding="utf-8"))
            assert found == [], f"{path} includes {found[0]}"


def test_no_name_twice():
    modules, classes = Counter(), Counter()
    for path in FILES.values():
        if path.stem != "__init__":
            modules[path.stem.lstrip("_")] += 1
        tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        classes.update(node.name for node in tree if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    assert [name for name, n in (*modules.items(), *classes.items()) if n > 1] == []
