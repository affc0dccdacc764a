"""Prompt lookup: drafts from the request itself, earlier answers and named files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np

from pyfly_cpp import _native
from pyfly_cpp._native.boundary import TokenArray
from pyfly_cpp.decoding.drafters.drafter import Host, Option, OwnDrafter, PathOption
from pyfly_cpp.decoding.drafters.lookup_texts import add_answers, read_answers, read_texts
from pyfly_cpp.ranges import require_integer

_Path = Union[str, "os.PathLike[str]"]


@dataclass(frozen=True)
class PromptLookup(OwnDrafter):
    """Finds earlier places of the last n tokens and proposes the tokens that followed them. Costs almost nothing; helps
    if an answer repeats the prompt (edits, summaries, code), an earlier answer, or a file of yours. Source: Saxena
    2023, "Prompt Lookup Decoding".

    The search covers the request itself, the answers that this FlyLlama or FlyBatch has given since the drafter was
    assigned, and `texts`. The place that agrees with the most tokens wins, among equals the request itself.

    With the gate `exact`, earlier answers make an answer faster and never change it. With any other gate, an answer of
    a FlyLlama may depend on its earlier ones; `memory=0` prevents that. A FlyBatch, whose requests may be anybody's,
    does not search earlier answers then. docs/drafters.md has more.
    """

    word = "lookup"
    noun = "prompt lookup"
    path_fields = ("memory_file", "texts")

    max_ngram_size: int = 4
    """Longest n-gram that is indexed, 1..64. Of the occurrences of the longest one that is found, the one that agrees
    with the most tokens wins."""

    num_pred_tokens: int = 10
    """Most tokens in a step (K), >= 1."""

    match: str = "latest"
    """Which occurrence in the request's own text: `"latest"`, the latest that agrees with the most tokens, or
    `"earliest"`, as the FLy reference code and llama-cpp-python do."""

    min_ngram_size: int = 1
    """Shortest n-gram that is looked up, 1..max_ngram_size. Larger proposes more rarely and is right more often."""

    memory: int = 2**18
    """Most tokens of earlier answers that are remembered, 0..2**27, each in 28 to 52 bytes; when it is full, the older
    half is dropped. 0: none, so that the speed of one answer reveals nothing about others."""

    memory_file: _Path | None = None
    """Where these answers are kept when the model is closed, for the next run; for one vocabulary."""

    texts: Sequence[_Path] = ()
    """Files in UTF-8, and folders of them, to search. They are read when the drafter is opened."""

    options = (
        Option("max_ngram_size", "max_ngram_size", 1, "Prompt lookup: longest n-gram.", 64, max_ngram_size),
        Option("min_ngram_size", "min_ngram_size", 1, "Prompt lookup: shortest n-gram.", 64, min_ngram_size),
        Option("num_pred_tokens", "num_pred_tokens", 1, "Prompt lookup: most tokens in a step.", None, num_pred_tokens),
        Option(
            "lookup_tokens",
            "memory",
            0,
            "Prompt lookup: tokens of earlier answers to remember; 0: none.",
            _native.MAX_LOOKUP,
            memory,
        ),
        PathOption("lookup_memory", "memory_file", "Prompt lookup: file that keeps these answers between runs."),
        PathOption("lookup_texts", "texts", "Prompt lookup: another file or folder to search; may be repeated.", True),
    )  # fmt: skip

    def __post_init__(self) -> None:
        if isinstance(self.texts, (str, os.PathLike)):
            raise ValueError(f"texts must be a sequence of paths, not {self.texts!r}; put it in a list.")
        try:
            object.__setattr__(self, "texts", tuple(map(os.fspath, self.texts)))
        except TypeError:
            raise ValueError(f"texts must be a sequence of paths, not {self.texts!r}.") from None
        if self.memory_file is not None:
            if not isinstance(self.memory_file, (str, os.PathLike)):
                raise ValueError(f"memory_file must be a path or None, not {self.memory_file!r}.")
            object.__setattr__(self, "memory_file", os.fspath(self.memory_file))
        require_integer("max_ngram_size", self.max_ngram_size, 1, 64)
        require_integer("min_ngram_size", self.min_ngram_size, 1, self.max_ngram_size)
        require_integer("num_pred_tokens", self.num_pred_tokens, 1)
        require_integer("memory", self.memory, 0, _native.MAX_LOOKUP)
        if self.memory_file is not None and self.memory == 0:
            raise ValueError("memory_file keeps the answers that are remembered, and memory=0 remembers none.")
        if not isinstance(self.match, str) or self.match not in _native.LOOKUP_MATCHES:
            raise ValueError(f"match must be 'latest' or 'earliest', not {self.match!r}.")

    @property
    def draft_most(self) -> int:  # type: ignore[override]
        return self.num_pred_tokens

    @classmethod
    def make(cls, file: str | os.PathLike[str] | None = None, **fields: Any) -> PromptLookup:
        longest = fields.get("max_ngram_size", cls.max_ngram_size)
        shortest = min(fields.get("min_ngram_size", cls.min_ngram_size), longest)
        fields.pop("draft_max", None)  # limits what is verified, not what is looked for
        return cls(**{**fields, "min_ngram_size": shortest})

    @property
    def native(self) -> tuple[int, ...]:
        """`pyfly_lookup_config` of pyfly.h."""
        match = _native.LOOKUP_MATCHES[self.match]
        return self.max_ngram_size, self.min_ngram_size, self.num_pred_tokens, match, self.memory

    @property
    def alone(self) -> PromptLookup:
        """The same without a memory: what it drafts for a text depends on no other answer."""
        return self.but(memory=0, memory_file=None)  # type: ignore[no-any-return]

    def open(self, host: Host | None = None) -> _native.LookupDrafter:
        none = np.zeros(0, dtype=np.int32)
        if host is None:
            return _native.LookupDrafter(None, self.native, none, none)
        target = host.target()
        path = None if self.memory_file is None else os.path.abspath(self.memory_file)  # wherever the process goes
        texts = read_texts(self.texts, host.vocabulary()) if self.texts else none
        answers = kept = none if path is None else read_answers(path, target.vocabulary)

        def keep(remembered: TokenArray) -> None:
            nonlocal kept
            if path is not None and not np.array_equal(remembered, kept):
                try:
                    add_answers(path, target.vocabulary, remembered, kept, self.memory)
                    kept = remembered
                except (OSError, ValueError) as error:  # the answers themselves were given
                    warnings.warn(f"the lookup memory was not kept: {error}", stacklevel=2)

        return _native.LookupDrafter(target, self.native, texts, answers, keep)

    def propose(self, history: Sequence[int]) -> list[int]:
        """The proposal for a token history, without a model: 0..num_pred_tokens token ids."""
        with self.open() as drafter:
            return drafter.propose(history, self.num_pred_tokens)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return "prompt lookup"
