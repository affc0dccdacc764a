"""Runs the command line in this process, as a script would see it: exit code, stdout, stderr."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pyfly_cpp.cli import main

MODELS = Path(__file__).parents[2] / "models" / "tiny"
TARGET = MODELS / "tiny-llama-target-f16.gguf"
DRAFT = MODELS / "tiny-llama-draft-f16.gguf"
HYBRID = MODELS / "tiny-qwen35-mtp-f16.gguf"


@dataclass
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """run(*arguments, stdin="", errors="strict") -> Result; stdin may be bytes"""
    monkeypatch.setenv("PYFLY_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("PYFLY_DEBUG", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def call(*arguments: object, stdin: str | bytes = "", errors: str = "strict") -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors=errors))
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        code = left.value.code
        return Result(code if isinstance(code, int) else 0 if code is None else 1, out, err)

    return call
