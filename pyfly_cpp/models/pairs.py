"""Published companions: which file people draft with for the models they have.

Names, sizes and licences as public code and documents gave them in November 2026; the hub itself was not asked. Which
file a name means, its size and its licence today are in the hub's listing (hub.py); the headers show what fits for
certain, once both files are here (companions.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pyfly_cpp.models import hub


@dataclass(frozen=True)
class Pair:
    """A family of models, and what drafts for it."""

    family: str
    """Name of the family."""
    pattern: str
    """Regular expression for the file names of its larger members, in lower case."""
    draft: str | None
    """A name of hub.py, with its type; None: the models carry a head of their own."""
    targets: tuple[str, ...] = ()
    """Repositories of the hub with larger models of the family as GGUF files. There are many more."""
    size: int = 0
    """Approximate size of the draft in bytes."""
    licence: str = ""
    """Licence of the draft."""
    note: str = ""


PAIRS = (
    Pair(
        "Qwen2.5-Coder",
        r"qwen2\.5-coder-(1\.5|3|7|14|32)b",
        "hf:Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q8_0",
        tuple(f"Qwen/Qwen2.5-Coder-{size}-Instruct-GGUF" for size in ("3B", "7B", "14B", "32B")),
        675710848,
        "Apache-2.0",
    ),
    Pair(
        "Qwen2.5",
        r"qwen2\.5-(1\.5|3|7|14|32|72)b",
        "hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0",
        tuple(f"Qwen/Qwen2.5-{size}-Instruct-GGUF" for size in ("3B", "7B", "14B", "32B", "72B")),
        675710816,
        "Apache-2.0",
    ),
    Pair(
        "Qwen3.5",
        r"qwen3\.5",
        None,
        ("unsloth/Qwen3.5-9B-GGUF",),
        note="has an MTP head if its file was converted with it",
    ),
    Pair("Qwen3-Next", r"qwen3-?next", None, note="has an MTP head if its file was converted with it"),
    Pair(
        "Qwen3",
        r"qwen3-(1\.7|4|8|14|30|32|235)b",
        "hf:Qwen/Qwen3-0.6B-GGUF:Q8_0",
        tuple(f"Qwen/Qwen3-{size}-GGUF" for size in ("4B", "8B", "14B", "30B-A3B", "32B")),
        639446688,
        "Apache-2.0",
    ),
    Pair(
        "Llama 3.1, 3.2, 3.3",
        r"llama-3\.[123]-(3|8|70|405)b",
        "hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
        tuple(f"bartowski/{name}-Instruct-GGUF" for name in ("Llama-3.2-3B", "Meta-Llama-3.1-8B", "Llama-3.3-70B")),
        807694464,
        "Llama 3.2 Community License",
    ),
    Pair(
        "Gemma 3",
        r"gemma-3-(4|12|27)b",
        "hf:ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
        tuple(f"ggml-org/gemma-3-{size}-it-GGUF" for size in ("4b", "12b", "27b")),
        806058240,
        "Gemma Terms of Use",
    ),
    Pair(
        "Mistral Small 3",
        r"(mistral|devstral|magistral)-small(?!.*draft)",
        "hf:bartowski/alamios_Mistral-Small-3.1-DRAFT-0.5B-GGUF:Q4_K_M",
        ("bartowski/mistralai_Mistral-Small-3.1-24B-Instruct-2503-GGUF",),
        400000000,
        "Apache-2.0",
    ),
    Pair(
        "SmolLM2",
        r"smollm2-(360m|1\.7b)",
        "hf:bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M",
        tuple(f"HuggingFaceTB/SmolLM2-{size}-Instruct-GGUF" for size in ("360M", "1.7B")),
        105454432,
        "Apache-2.0",
    ),
)
"""The families; the first whose pattern matches a name is meant."""


def published_pair(model: str | os.PathLike[str]) -> Pair | None:
    """The published draft of a model, by the name of its file or of its repository."""
    name = re.sub("[_:]", "-", Path(model).name.lower())
    name = re.sub(r"^(llama|gemma)(?=\d)", r"\1-", name)  # as Ollama spells them
    return next((pair for pair in PAIRS if re.search(pair.pattern, name)), None)


class Offer(NamedTuple):
    """A model of the hub, as its listing has it."""

    name: hub.HubName
    model: hub.HubModel
    licence: str
    is_gated: bool


def offers(target: hub.HubName, ask: Callable[[str], hub.Listing] = hub.ask) -> tuple[Offer, Offer | None]:
    """A target on the hub, and the draft that is published for its family, as their listings have them.

    Args:
        ask: Gives the listing of a repository.

    Raises:
        ValueError: a name means no model of its repository, or several; or huggingface_hub is not installed.
        PyflyError: the hub cannot be reached, or does not know a repository.
    """

    def offer(name: hub.HubName) -> Offer:
        listing = ask(name.repo)
        model = listing.model(name)
        return Offer(listing.name(model), model, listing.licence, listing.is_gated)

    found = offer(target)
    pair = published_pair(target.file or target.repo)
    return found, None if pair is None or pair.draft is None else offer(hub.read_name(pair.draft))
