"""llama.cpp's own tests of its server, run against ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import gguf
from generator import source as sdist
from gguf_edit import edit_gguf
from llama_server import MODEL

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TINY = ROOT / "models" / "tiny"
TESTS = Path("tools", "server", "tests")

FILES = {
    "basic": "models, properties, slots", "chat_completion": "chats", "compat_oai_responses": "/v1/responses",
    "completion": "completions", "ctx_shift": "full contexts", "embedding": "embeddings",
    "ignore_eos": "`ignore_eos`", "infill": "/infill", "speculative": "drafts", "template": "chat templates",
    "tokenize": "tokens",
}  # fmt: skip
"""The tests of routes for text: `unit/test_NAME.py`, and a name for people."""


def prepare(folder: Path) -> Path:
    """Puts the suite into a folder, with the stand-ins for its server and its models; returns where it is to be run."""
    found = sdist(folder)
    tests = folder / "llama.cpp" / TESTS
    shutil.copytree(found / TESTS, tests)
    (folder / "llama.cpp" / "models").symlink_to(found / "models")
    shutil.copy(HERE / "suite_conftest.py", tests / "conftest.py")
    for role in ("target", "draft"):
        _make_model(TINY / f"tiny-llama-{role}-f16.gguf", folder / f"{role}.gguf")
    return tests


def _make_model(source: Path, path: Path) -> None:
    """A tiny model, changed to be like the suite's: it can fill in, and writes as long as it may."""
    tokens = gguf.GGUFReader(source).fields["tokenizer.ggml.tokens"].contents()
    named = [token.replace("<|", "<").replace("|>", ">") for token in tokens]  # llama.cpp knows ends by their texts
    ids = dict(zip(("fim_pre", "fim_suf", "fim_mid", "eos", "eot"), range(len(tokens) - 8, len(tokens))))
    fields = {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items()}
    edit_gguf(source, path, {**fields, "tokenizer.ggml.tokens": named})


def run(folder: Path, tests: Path, names=tuple(FILES), select: str = "") -> dict[str, str]:
    """Runs the tests of these files; by the name of each: "" if it passed, or why not (`skipped`, or its error)."""
    report = folder / "report.xml"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, tests))),
        MODEL: str(folder / "target.gguf"),
        "PYFLY_PEER_DRAFT": str(folder / "draft.gguf"),
    }
    files = [f"unit/test_{name}.py" for name in names]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--maxfail", "1000", "-k", select,
         "--junitxml", report, *files],
        cwd=tests, env=environment, stdout=subprocess.DEVNULL if not os.environ.get("PYFLY_DEBUG") else None,
    )  # fmt: skip
    out = {}
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname').rpartition('.')[2].removeprefix('test_')}::{case.get('name')}"
        found = [(part.tag, part.get("message", "")) for part in case if part.tag in ("failure", "error", "skipped")]
        out[name] = "" if not found else f"{found[0][0]}: {found[0][1].splitlines()[0] if found[0][1] else ''}"
    return out
