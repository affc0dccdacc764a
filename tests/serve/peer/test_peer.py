"""llama.cpp's own tests of its server pass here, but for those that are expected to fail, each for its reason."""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest

if not all(importlib.util.find_spec(name) for name in ("requests", "openai", "gguf", "starlette")):
    pytest.skip("needs requests, openai and gguf", allow_module_level=True)

from expected import EXPECTED, MODEL, reason_of
from generator import Missing
from suite import FILES, ROOT, prepare, run

pytestmark = pytest.mark.peer


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
    assert table(results) in (ROOT / "docs" / "design" / "serving.md").read_text(encoding="utf-8"), table(results)
