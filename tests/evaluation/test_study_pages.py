"""What the study's pages and those that cite it say, against what its records say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

from study.page import BEGIN, END  # noqa: E402

from pyfly_cpp.decoding.presets import load_preset  # noqa: E402

PAGE, TABLES = BENCHMARKS / "fidelity.md", BENCHMARKS / "fidelity_tables.md"
INTERVAL = re.compile(r"\([-+]?[\d.]+\.\.[-+]?[\d.]+\)")


def cells(name: str) -> dict[str, str]:
    """The line of a shipped preset's rule in the study's page, by the heads of its columns."""
    table = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    line = next(line for line in table if line[0].startswith(f"| `{load_preset(name).decoding.gate}` (preset"))
    return dict(zip((head.strip("| ") for head in table[0]), line))


def texts_of(name: str) -> dict[str, str]:
    """What cites a preset's figures, each with its lines joined."""
    paths = [PAGE, ROOT / "docs" / "choosing.md", ROOT / "README.md"]
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
    texts[PAGE.name] = texts[PAGE.name].partition(END)[2]  # what is written by hand
    texts[f"{name}.json"] = load_preset(name).claim["measured"]
    return {of: flattened(text) for of, text in texts.items()}


def flattened(text: str) -> str:
    """On one line, and without signs of what is not negative."""
    return " ".join(text.split()).replace("+", "")


@pytest.fixture
def packed(tmp_path):
    """The records that are committed: what `pack` has not packed yet does not count."""
    folder = tmp_path / "records"
    folder.mkdir()
    for path in (BENCHMARKS / "fidelity_records").glob("*.xz"):
        shutil.copy(path, folder)
    return folder


def run(script: str, *arguments: object) -> str:
    """What a script of benchmarks prints."""
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8", timeout=300).stdout


def test_the_pages_are_what_the_records_say(packed, tmp_path):
    page, tables = tmp_path / PAGE.name, tmp_path / TABLES.name
    for written, committed in ((page, PAGE), (tables, TABLES)):
        before, _, rest = committed.read_text(encoding="utf-8").partition(BEGIN)
        written.write_text(f"{before}{BEGIN}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    run("fidelity.py", "report", "--records", packed, "--page", page, "--tables", tables)
    assert page.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
    assert tables.read_text(encoding="utf-8") == TABLES.read_text(encoding="utf-8")


def test_the_page_of_all_rules_is_what_the_records_say(packed):
    assert run("rules.py", "--records", packed) == (BENCHMARKS / "rules.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["balanced", "fast"])
def test_what_cites_a_preset_has_its_figures(name):
    line = cells(name)
    cited, counts = [line["points"]], [line["items"]]
    if name == "balanced":
        other, _, n_other = line["other parts: points"].rstrip("| ").partition(" of ")
        cited += [line["recovery, %"], other]
        counts.append(n_other)
    for of, text in texts_of(name).items():
        for cell in cited:
            interval = INTERVAL.search(cell)
            assert interval is not None and flattened(interval[0]) in text, f"{of} does not have {cell} of {name}"
        assert all(f"{n} items" in text for n in counts), of
