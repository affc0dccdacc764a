"""Published companions: which file people draft with for the models they have.

Names, sizes and licences as public code and documents gave them in November 2026; the hub itself was not asked. What
fits for certain, the headers say once both files are here (companions.py).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pair:
    """A family of models, and what drafts for it."""

    family: str
    """For people."""
    pattern: str
    """Regular expression that file names of its larger members match, in lower case."""
    draft: str | None
    """`hf:OWNER/REPO/FILE` or a name of the registry; None: the models carry a head of their own."""
    size: int = 0
    """Bytes of the draft, about."""
    licence: str = ""
    """The draft's."""
    note: str = ""


PAIRS = (
    Pair(
        "Qwen2.5-Coder",
        r"qwen2\.5-coder-(3|7|14|32)b",
        "hf:Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/qwen2.5-coder-0.5b-instruct-q8_0.gguf",
        675710848,
        "Apache-2.0",
    ),
    Pair(
        "Qwen2.5",
        r"qwen2\.5-(3|7|14|32|72)b",
        "hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF/qwen2.5-0.5b-instruct-q8_0.gguf",
        675710816,
        "Apache-2.0",
    ),
    Pair("Qwen3.5", r"qwen3\.5", None, note="carries an MTP head where its file was converted with it"),
    Pair("Qwen3-Next", r"qwen3-?next", None, note="carries an MTP head where its file was converted with it"),
    Pair(
        "Qwen3",
        r"qwen3-(4|8|14|30|32|235)b",
        "hf:Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf",
        639446688,
        "Apache-2.0",
    ),
    Pair(
        "Llama 3.1, 3.2, 3.3",
        r"llama-3\.[123]-(3|8|70|405)b",
        "hf:bartowski/Llama-3.2-1B-Instruct-GGUF/Llama-3.2-1B-Instruct-Q4_K_M.gguf",
        807694464,
        "Llama 3.2 Community License",
    ),
    Pair(
        "Gemma 3",
        r"gemma-3-(4|12|27)b",
        "hf:ggml-org/gemma-3-1b-it-GGUF/gemma-3-1b-it-Q4_K_M.gguf",
        806058240,
        "Gemma Terms of Use",
    ),
    Pair(
        "Mistral Small 3",
        r"(mistral|devstral|magistral)-small(?!.*draft)",
        "hf:bartowski/alamios_Mistral-Small-3.1-DRAFT-0.5B-GGUF/alamios_Mistral-Small-3.1-DRAFT-0.5B-Q4_K_M.gguf",
        400000000,
        "Apache-2.0",
    ),
    Pair("SmolLM2", r"smollm2-(360m|1\.7b)", "smollm2-135m", 98362432, "Apache-2.0"),
)
"""The first whose pattern matches counts."""


def published_pair(model_path: str | os.PathLike[str]) -> Pair | None:
    """What is published for a model, by the name of its file."""
    name = Path(model_path).name.lower().replace("_", "-")
    return next((pair for pair in PAIRS if re.search(pair.pattern, name)), None)
