"""llama.cpp's own tests of its server, run against ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
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
    "basic": "models, properties, slots", "chat_completion": "chats", "compat_anthropic": "/v1/messages",
    "compat_oai_responses": "/v1/responses", "completion": "completions", "ctx_shift": "full contexts",
    "embedding": "embeddings", "ignore_eos": "`ignore_eos`", "infill": "/infill", "metrics": "timings and metrics",
    "security": "keys and origins", "speculative": "drafts", "template": "chat templates", "tokenize": "tokens",
    "tool_call": "functions that are not called",
}  # fmt: skip
"""The tests of what is served: `unit/test_NAME.py`, and a name for people."""

LEFT_OUT = {
    "compat_gcp": "Google's prediction route", "kv_keep_only_active": "idle slots that are moved to a cache in memory",
    "lora": "adapters that a request chooses", "mcp_servers": "MCP servers that the server starts",
    "proxy": "its proxy for MCP", "rerank": "`/rerank`", "router": "a router of several models",
    "sleep": "models that are unloaded while idle", "slot_save": "slots saved to files",
    "stream": "streams that a client resumes", "tools_builtin": "tools that the server runs", "vision_api": "images",
}  # fmt: skip
"""The tests of what is not served, and what that is."""

LARGE = {"tool_call": "calls, which a model of 1 to 8 billion parameters has to make"}
"""Files of which only some tests are run, and what the others are about: those named here."""
_LARGE_TESTS = (
    "test_completion_with_required_tool_real_model", "test_weather", "test_calc_result", "test_thoughts",
    "test_hello_world",
)  # fmt: skip


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


def count(folder: Path, tests: Path) -> dict[str, int]:
    """The number of tests in each file of the suite."""
    done = _pytest(folder, tests, "--collect-only", "unit", stdout=subprocess.PIPE, text=True)
    found = re.findall(r"^unit/test_(\w+)\.py::", done.stdout, re.MULTILINE)
    return dict(sorted(Counter(found).items()))


def _pytest(folder: Path, tests: Path, *arguments, **options) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, tests))),
        MODEL: str(folder / "target.gguf"),
        "PYFLY_PEER_DRAFT": str(folder / "draft.gguf"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=tests, env=environment, **options)


def run(folder: Path, tests: Path, names=tuple(FILES), select: str = "") -> dict[str, str]:
    """Runs the tests of these files; by the name of each: "" if it passed, or why not (`skipped`, or its error)."""
    report = folder / "report.xml"
    files = [f"unit/test_{name}.py" for name in names]
    select = " and ".join([*(f"not {name}" for name in _LARGE_TESTS), *([f"({select})"] if select else [])])
    _pytest(
        folder, tests, "-n", "2", "--maxfail", "1000", "-k", select, "--junitxml", report, *files,
        stdout=subprocess.DEVNULL if not os.environ.get("PYFLY_DEBUG") else None,
    )  # fmt: skip
    out = {}
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname').rpartition('.')[2].removeprefix('test_')}::{case.get('name')}"
        found = [(part.tag, part.get("message", "")) for part in case if part.tag in ("failure", "error", "skipped")]
        out[name] = "" if not found else f"{found[0][0]}: {found[0][1].splitlines()[0] if found[0][1] else ''}"
    return out
