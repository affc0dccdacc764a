"""The examples in the help of the commands do what they say."""

from __future__ import annotations

import re
import shlex

import pytest
from documents import fill

from pyfly_cpp.cli import _COMMANDS, loading, models_command

from .conftest import TARGET

assert loading  # imported before anything is patched
LOAD = ["-c", 256, "-t", 1, "--force"]

LESS = {
    (): [],
    ("chat",): ["-t", 1],
    ("complete",): ["-t", 1, "-n", 4],
    ("bench",): [*LOAD, "-n", 4, "--limit", 5],
    ("eval",): [*LOAD, "-n", 4, "--limit", 1],
    ("explain",): [*LOAD, "-n", 4],
    ("demo",): ["-c", 1024, "-t", 1, "-n", 4],
    ("doctor",): [],
    ("models",): [],
    ("models", "list"): [],
    ("models", "fetch"): [],
    ("models", "path"): [],
    ("models", "pair"): [],
    ("models", "draft"): [],
}
"""By command what keeps its example short. `serve` does not end by itself; `heads` trains."""


def examples(text):
    """(arguments, what is piped in) of every `pyfly-cpp ...` in the example of a help."""
    example = text.partition("Example:")[2].partition("\n\n")[0]
    lines = re.sub(r"\\\n", " ", example) if "\\\n" in example else re.sub(r"\n(?! *pyfly-cpp)", " ", example)
    for line in lines.splitlines():
        piped = re.match(r"\s*echo '(.*)' \|", line)
        for found in re.finditer(r"pyfly-cpp ((?:'[^']*'|\"[^\"]*\"|[^|&)\"'])+)", line):
            yield shlex.split(found[0])[1:], piped[1] if piped else ""


def test_every_command_is_here():
    assert {command[0] for command in LESS if command} == set(_COMMANDS) - {"serve", "heads"}


@pytest.mark.parametrize("command", LESS, ids=lambda command: " ".join(command) or "pyfly-cpp")
def test_the_example_runs(run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    monkeypatch.setattr(models_command, "fetch_with_bar", lambda name: TARGET)  # what it does: test_hub_models.py
    monkeypatch.setattr(models_command.models, "locate", lambda name: TARGET)
    found = list(examples(run(*command, "--help").out))
    assert found
    for arguments, stdin in found:
        here = tuple(arguments[: len(command)])
        if here != command and command:
            continue  # how it goes on, in another command
        result = run(*arguments, *(LESS[command] if command else ["-t", 1]), stdin=stdin)
        assert result.code == 0, (arguments, result.err)
