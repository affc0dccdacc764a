"""Settings that change between requests, in every order: drafters, presets, gates, windows, lengths, adaptive, kernels.
Every request ends, and under the exact gate its answer is that of plain decoding."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from heads import EAGLE3

pytestmark = pytest.mark.fuzz

LIMIT = 120
"""Seconds that an order may take: it takes one, and a hundred times as long where others use the cores."""

PROGRAM = Path(__file__).with_name("settings_orders.py")


@pytest.mark.alike
def test_every_order_of_settings_ends(cases, tiny_target, tiny_draft, tiny_qwen35):
    seeds = list(cases(60))
    models = [tiny_target, tiny_draft, tiny_qwen35, EAGLE3]
    with subprocess.Popen(
        [sys.executable, PROGRAM, *models, str(seeds[0]), str(len(seeds))],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        lines: queue.Queue[str] = queue.Queue()

        def read():
            for line in process.stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        said = []
        try:
            while not said or said[-1] not in ("done\n", ""):
                said.append(lines.get(timeout=LIMIT))
            assert said[-1], "".join(said[-40:])
        except queue.Empty:
            pytest.fail(f"no word for {LIMIT} s behind {''.join(said[-5:])}")
        finally:
            process.kill()
