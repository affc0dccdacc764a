"""llama.cpp's own tests of its server pass here, but for those that are expected to fail, each for its reason."""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest

if not all(importlib.util.find_spec(name) for name in ("requests", "openai", "gguf", "starlette")):
    pytest.skip("needs requests, openai and gguf", allow_module_level=True)

from expected import EXPECTED, MODEL, reason_of
from generator import Missing
from suite import FILES, LARGE, LEFT_OUT, ROOT, count, prepare, run

pytestmark = pytest.mark.peer


def left_out(counts: dict[str, int], results: dict[str, str]) -> str:
    """What docs/design/serving.md shows of the tests that are not run."""
    n_run = Counter(name.partition("::")[0] for name in results)
    rest = {file: counts[file] - n_run[file] for file in counts}
    named = "; ".join(f"{ {**LEFT_OUT, **LARGE}[file] } ({n})" for file, n in rest.items() if n)
    n = sum(counts.values())
    return f"Of its {n} tests in {len(counts)} files, {sum(n_run.values())} in {len(n_run)} are run. Left out: {named}."


def test_every_file_of_the_suite_is_run_or_left_out_for_a_reason(tmp_path):
    try:
        tests = prepare(tmp_path)
    except Missing as missing:
        pytest.skip(str(missing))
    assert not FILES.keys() & LEFT_OUT.keys() and FILES.keys() | LEFT_OUT.keys() == count(tmp_path, tests).keys()


def table(results: dict[str, str]) -> str:
    """What docs/design/serving.md shows of the results."""
    lines = [
        "| llama.cpp's tests of | tests | pass | need its model | other reasons |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    rows: dict[str, Counter[str]] = {file: Counter() for file in FILES}
    reasons: Counter[str] = Counter()
    for name, why in results.items():
        reason = reason_of(name) if why else ""
        kind = "pass" if not why else "model" if reason == MODEL else "other"
        rows[name.partition("::")[0]].update((kind, "all"))
        reasons[reason] += kind == "other"
    rows["all"] = sum(rows.values(), Counter())
    for file, row in rows.items():
        cells = (FILES.get(file, "**all**"), row["all"], row["pass"], row["model"], row["other"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    told = "; ".join(f"{reason} ({n})" for reason in EXPECTED if (n := reasons[reason]))
    return "\n".join([*lines, "", f"The other reasons: {told}.", ""])


def test_llama_cpps_own_tests(tmp_path):
    try:
        tests = prepare(tmp_path)
    except Missing as missing:
        pytest.skip(str(missing))
    results = run(tmp_path, tests)
    assert len(results) > 150
    surprises = {name: why or "passes" for name, why in results.items() if bool(why) != bool(reason_of(name))}
    assert not surprises
    page = (ROOT / "docs" / "design" / "serving.md").read_text(encoding="utf-8")
    for text in (table(results), left_out(count(tmp_path, tests), results)):
        assert text in page, text
