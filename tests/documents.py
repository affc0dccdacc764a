"""The examples of the documentation, and a folder in which they run: the tiny models under the names that they use."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "models" / "tiny"

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "models" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]

LINKS = {
    "target.gguf": "tiny-llama-target-f16.gguf",
    "Qwen2.5-7B-Instruct-Q4_K_M.gguf": "tiny-llama-target-f16.gguf",
    "qwen3-4b.gguf": "tiny-llama-target-f16.gguf",
    "draft.gguf": "tiny-llama-draft-f16.gguf",
    "head.gguf": "tiny-llama-eagle3-f16.gguf",
    "qwen3-4b-dflash.gguf": "tiny-llama-dflash-f16.gguf",
}
"""The tiny model behind each file of the examples."""


def name(path: Path) -> str:
    """A document's name in the repository."""
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    path: Path
    line: int
    """Of its first fence, from 1."""
    language: str
    marker: str
    """The second word of its info string: `not-run` where the tests cannot run it, `server` where they need one."""
    text: str

    def __str__(self) -> str:
        return f"{name(self.path)}:{self.line}"


def blocks(path: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a document, in the order of the text; of these languages alone, where some are given."""
    found = []
    for fence in re.finditer(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", path.read_text(encoding="utf-8"), re.MULTILINE):
        indent, info, text = fence.groups()
        language, _, marker = info.partition(" ")
        line = fence.string.count("\n", 0, fence.start()) + 1
        lines = (one[len(indent) :] for one in text.splitlines(keepends=True))
        found.append(Block(path, line, language, marker, "".join(lines)))
    return [block for block in found if not languages or block.language in languages]


def all_blocks(*languages: str) -> list[Block]:
    """Those of all documents."""
    return [block for path in DOCUMENTS for block in blocks(path, *languages)]


def spans(path: Path) -> list[str]:
    """The code spans of a document's text."""
    text = re.sub(r"^( *)```(?:.*\n)*?\1```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = re.findall(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", text, re.DOTALL)
    return [span.replace(r"\|", "|") for _, span in found]


def fill(folder: Path) -> None:
    """Puts the files that examples name into a folder: models, tasks, prompts, a judge, texts to index."""
    for name, model in LINKS.items():
        (folder / name).symlink_to(TINY / model)
    shutil.copy(ROOT / "tests" / "data" / "gsm8k_sample.jsonl", folder / "gsm8k_test.jsonl")
    (folder / "src").mkdir()
    for name in ("src/text.py", "notes.md"):
        (folder / name).write_text("def f(x):\n    return x\n" * 20)
    rows = "".join(json.dumps({"prompt": f"How many are {i} and {i}?"}) + "\n" for i in range(5))
    for name in ("spec_bench.jsonl", "mine.jsonl"):
        (folder / name).write_text(rows)
    judge = {"format": 1, "features": {"margin": -1.0}, "bias": 0.0, "threshold": 0.5}
    (folder / "mine.judge.json").write_text(json.dumps(judge))


_SHELL = """
PATH=/nowhere
command_not_found_handle() { :; }
cd() { :; }
pyfly-cpp() { printf '%s\\0' "$@" $'\\1' >> "$CALLS"; }
"""
"""No program is found and none runs; of ours it is written down how it is called."""


def calls(script: str, folder: Path) -> list[list[str]]:
    """The arguments of each `pyfly-cpp` in a script, as bash takes it apart. Fails where bash cannot."""
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert checked.returncode == 0 and not checked.stderr, checked.stderr
    log = folder / "calls"
    log.write_bytes(b"")
    subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", _SHELL + script], cwd=folder, env={"CALLS": str(log), "DATA": "."},
        stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    return [call.split("\0")[:-1] for call in log.read_text().split("\1\0")[:-1]]
