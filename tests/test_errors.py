"""Errors that name arguments in Python's words, and in those of whoever shows them."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from pyfly_cpp import PyflyError
from pyfly_cpp.cli import describe, in_options
from pyfly_cpp.errors import ArgumentError, IncompatibleDraftError

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", [ArgumentError, PyflyError, IncompatibleDraftError])
def test_an_argument_has_the_name_that_its_reader_knows(kind):
    error = kind("{draft_max} is 9; set it with {nothing}{draft}, in {'draft_max'}.")
    assert str(error) == "draft_max is 9; set it with {nothing}, in {'draft_max'}."
    assert in_options(error) == "--draft-max is 9; set it with {nothing}, or give it with --draft, in {'draft_max'}."
    assert describe(error) == in_options(error) and error.in_words({}) == str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_others_are_as_they_are():
    assert in_options(ValueError("{draft_max}")) == "{draft_max}" and in_options(PyflyError()) == ""


def test_braces_of_a_file_are_its_own():
    error = ArgumentError("""'/a/{log}.gguf' and "it's {n_ctx}" do not fit the model's size{log}; lower {n_ctx}.""")
    assert str(error) == """'/a/{log}.gguf' and "it's {n_ctx}" do not fit the model's size; lower n_ctx."""
    assert in_options(error) == """'/a/{log}.gguf' and "it's {n_ctx}" do not fit the model's size; lower --n-ctx."""
    before = """'/a/{log}.gguf' and "it's {n_ctx}" do not fit the model's size"""
    assert error.around("log") == (before, "; lower {n_ctx}.") and error.around("guess") is None


def test_what_the_core_names_has_words_in_python():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "csrc").rglob("*.cpp")]
    literals = [text for source in texts for text in re.findall(r'"(?:[^"\\\n]|\\.)*"', source)]
    named = {word for text in literals for word in re.findall(r"\{(\w+)\}", text)}
    drafters = {"head", "cross", "draft_model", "dflash", "dspark"}
    assert {"draft_max", "n_batch", "n_ctx", "flash_attn", "log", *drafters} == named
    assert all(str(ArgumentError(f"{{{word}}}")) != f"{{{word}}}" for word in named)
