"""The words for what a GGUF file's header has."""

from __future__ import annotations

import pytest

from pyfly_cpp.models.metadata import _as_in_names


@pytest.mark.parametrize(
    ("described", "name"),
    [
        ("Q4_K - Medium", "Q4_K_M"), ("Q3_K - Large", "Q3_K_L"), ("Q2_K - Small", "Q2_K_S"), ("Q2_K - Medium", "Q2_K"),
        ("IQ4_XS - 4.25 bpw", "IQ4_XS"), ("F16", "F16"), ("(guessed) Q5_K - Small", "(guessed) Q5_K_S"),
    ],
)  # fmt: skip
def test_quantisations_have_the_names_that_files_have(described, name):
    assert _as_in_names(described) == name
