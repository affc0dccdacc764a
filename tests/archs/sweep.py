"""Every trial of a model, in processes of their own, so that an abort is an outcome and not the end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from trials import TRIALS

HERE = Path(__file__).parent


def trials_of(name: str) -> list[str]:
    """The trials that apply to a model of this name, of those that `PYFLY_ARCHS_TRIALS` asks for."""
    wanted = re.compile(os.environ.get("PYFLY_ARCHS_TRIALS", ""))
    return [trial for trial in TRIALS if name.endswith("-mtp") == trial.startswith("mtp") and wanted.search(trial)]


def outcomes(description: Path, folder: Path, seconds: float = 300) -> dict[str, str]:
    """Makes a model out of its description and puts it through its trials.

    Returns:
        For each trial "ok", "wrong 0.41" (how far off in nats), "crash: ASSERTION", "hangs", or the error. Where the
        model cannot be made, the same of "make" alone.
    """
    path = folder / f"made-{description.name}"
    _, failure = _run([str(HERE / "weights.py"), str(description), str(path), *_left_out(description.stem)], seconds)
    if failure:
        return {"make": failure}
    found: dict[str, str] = {}
    names = trials_of(description.stem)
    while len(found) < len(names):
        left = [name for name in names if name not in found]
        lines, failure = _run([str(HERE / "trials.py"), str(path), *left], seconds)
        running = left[0]
        for line in lines:
            if "begins" in line:
                running = line["begins"]
            else:
                found[line["trial"]] = _in_words(line).replace(str(path), "MODEL")
        if failure:
            found[running] = failure
    path.unlink()
    return found


def _left_out(name: str) -> list[str]:
    """Tensors that llama.cpp takes for optional, and that files of the architecture do not have."""
    return ["time_mix_first"] if name.startswith("rwkv6qwen2-") else []


def _run(arguments: list[str], seconds: float) -> tuple[list[dict], str]:
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    try:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired as expired:
        return _parsed(expired.stdout), "hangs"
    failure = ""
    if done.returncode:
        text = done.stderr.decode(errors="replace").strip().splitlines() or [f"signal {-done.returncode}"]
        said = [line for line in text if "ASSERT" in line or "Error" in line] or text
        failure = f"crash: {said[-1].rsplit('/', 1)[-1]}"
    return _parsed(done.stdout), failure


def _parsed(output: bytes | None) -> list[dict]:
    return [json.loads(line) for line in (output or b"").decode().splitlines() if line.startswith("{")]


def _in_words(outcome: dict) -> str:
    if "error" in outcome:
        return str(outcome["error"])
    off = max(outcome["gap"], outcome["logprob"])
    return "ok" if off <= outcome["tolerance"] else f"wrong {off:.2g}"
