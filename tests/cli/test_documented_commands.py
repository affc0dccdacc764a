"""The commands in the documentation: all of them are understood, and what is cheap runs."""

from __future__ import annotations

import re
import shutil

import click
import pytest
from documents import DOCUMENTS, blocks, calls, fill, name, spans

from pyfly_cpp.decoding import Decoding

from .test_examples import LESS

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")

HELD_FOR = {"TASK": "gsm8k", "MODEL": "target.gguf", "TARGET": "target.gguf", "DRAFT": "draft.gguf"}
"""What stands for a reader's own."""


@pytest.fixture
def parse(run, monkeypatch):
    """parse(arguments) -> Result of taking them apart; nothing runs."""

    def call(arguments):
        with monkeypatch.context() as patch:
            patch.setattr(click.Command, "invoke", lambda *_: None)
            return run(*arguments)

    return call


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path, "bash")], ids=name)
def test_commands(run, parse, tmp_path, monkeypatch, path):
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    for block in blocks(path, "bash"):
        found = calls(block.text, tmp_path)
        assert len(found) == len(re.findall(r"(?<![./\w])pyfly-cpp [a-z]", block.text)), (str(block), found)
        assert found or block.marker == "not-run", f"{block} has no command of ours, so it is bash not-run"
        for arguments in found:
            result = parse(arguments)
            assert result.code == 0, (str(block), arguments, result.err)
            for option, value in zip(arguments, arguments[1:]):
                if option == "-s" and arguments[0] in ("bench", "eval", "explain"):
                    Decoding.parse(value)
            if block.marker == "":
                command = next(words for words in LESS if words and [*words] == arguments[: len(words)])
                result = run(*arguments, *LESS[command])
                assert result.code == 0, (str(block), arguments, result.err)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_commands_within_the_text(parse, tmp_path, monkeypatch, path):
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    for span in spans(path):
        if "pyfly-cpp " in span and "COMMAND" not in span:
            for arguments in calls(span, tmp_path):
                result = parse([HELD_FOR.get(word, word) for word in arguments])
                is_name = len(arguments) <= 2 and all(map(str.isalpha, arguments))
                assert result.code == 0 or (is_name and result.code == 2), (span, result.err)
