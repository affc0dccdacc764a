"""Memory stays flat over many requests in one process, and over contexts that are opened and closed."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "resident.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_flat(tiny_target, tiny_draft, tmp_path):
    record = tmp_path / "record.json.gz"
    subprocess.run([sys.executable, str(SCRIPT), tiny_target, tiny_draft, "--record", str(record)], check=True)
    with gzip.open(record, "rt") as file:
        alone, batch, contexts = (found["kb_each"] for found in json.load(file)["measured"].values())
    assert alone < 5 and batch < 5, "KB for each request"
    assert contexts < 200, "KB for each context; the smallest cache has 1,500"
