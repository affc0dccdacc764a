"""Every architecture that llama.cpp's own generator of models describes: `pytest -m archs tests/archs -n 0`. Minutes.

`PYFLY_ARCHS` and `PYFLY_ARCHS_TRIALS` are regular expressions of the names of models and trials, all by default;
`PYFLY_ARCHS_TABLE` is a file for the table of outcomes, in Markdown.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from exceptions import expected_of
from generator import Missing, descriptions
from sweep import outcomes
from table import table

pytestmark = pytest.mark.archs


def test_every_architecture_does_what_it_should(tmp_path):
    try:
        found = descriptions(tmp_path)
    except Missing as why:
        pytest.skip(str(why))
    wanted = re.compile(os.environ.get("PYFLY_ARCHS", ""))
    found = [path for path in found if wanted.search(path.stem)]
    results = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, result in zip(found, pool.map(lambda path: outcomes(path, tmp_path), found)):
            results[path.stem] = result
            print(path.stem, {trial: what for trial, what in result.items() if what != "ok"}, flush=True)
    if os.environ.get("PYFLY_ARCHS_TABLE"):
        Path(os.environ["PYFLY_ARCHS_TABLE"]).write_text(table(results), encoding="utf-8")
    surprises = {}
    for name, result in results.items():
        for trial, what in result.items():
            if what != "ok" and not any(one.covers(trial, what) for one in expected_of(name)):
                surprises[f"{name} {trial}"] = what
        for one in expected_of(name):
            is_tried = any(re.fullmatch(one.trials, trial) for trial in result)
            if is_tried and not any(one.covers(trial, what) for trial, what in result.items()):
                surprises[name] = f"does all it should: take it from exceptions.py ({one.why})"
    assert not surprises
