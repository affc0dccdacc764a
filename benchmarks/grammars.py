"""What a JSON schema costs: llama.cpp's grammars, as we write them, against llguidance.

    pip install llguidance
    python benchmarks/grammars.py [--model MODEL] [--repeats 5]

For each schema a right answer is cut into the model's tokens and read. Three times are printed for a token: by
llama.cpp's grammar the check of one token (a greedy sampler asks only for its own choice) and of the whole vocabulary
(where that choice is not allowed), and llguidance's mask of the whole vocabulary: medians of one thread's processor
time. "no": the right answer is refused. Each schema is also tried with an answer that does not follow it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from statistics import median

import llama_cpp
import llguidance
import llguidance.numpy
import numpy as np
from common import markdown, print_machine
from llguidance.llamacpp import lltokenizer_from_vocab

from pyfly_cpp.grammar.schemas import gbnf_of
from pyfly_cpp.models.named import embedded_model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CASES: dict[str, tuple[object, object, object]] = {
    "an object": (PERSON, {"name": "Ada Lovelace", "age": 36}, {"name": "Ada", "age": 121}),
    "a list of them": (
        {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 20},
        [{"name": f"Person {i}", "age": 20 + i} for i in range(12)],
        [{"name": "Ada", "age": 36}],
    ),
    "one of 200 words": ({"enum": [f"word {i}" for i in range(200)]}, "word 137", "word 200"),
    "a date": ({"type": "string", "format": "date"}, "2024-02-29", "2024-13-01"),
    "a number in a range": ({"type": "number", "minimum": -1.5, "maximum": 2.25}, 2.125, 2.5),
    "a pattern": ({"type": "string", "pattern": "^[A-Z]{2}-\\d{4}$"}, "AB-1234", "AB-123"),
    "one of two objects": (
        {"anyOf": [PERSON, {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}]},
        {"id": 12},
        {"id": "twelve"},
    ),
    "a long text": ({"type": "string", "maxLength": 2000}, "All is well in the long run. " * 40, "x" * 2001),
}  # fmt: skip
"""A schema, an answer that follows it, and one that does not."""


class Clock:
    """Times of one thread."""

    def __init__(self) -> None:
        self.us: list[float] = []

    def __enter__(self) -> None:
        self._begin = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.us.append(1e6 * (time.thread_time() - self._begin))


class Vocabulary:
    """A model's tokens."""

    def __init__(self, path: str) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self.vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_model_load_from_file(os.fsencode(path), params))
        self.n = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.end = llama_cpp.llama_vocab_eos(self.vocab)
        self.guide = lltokenizer_from_vocab(self.vocab)

    def tokens(self, answer: object) -> list[int]:
        text = json.dumps(answer).encode()
        out = (llama_cpp.llama_token * (len(text) + 8))()
        n = llama_cpp.llama_tokenize(self.vocab, text, len(text), out, len(out), False, False)
        return [*out[:n], self.end]


class Ours:
    """A grammar of llama.cpp, by our reading of the schema."""

    def __init__(self, vocabulary: Vocabulary, schema: object) -> None:
        self._vocabulary = vocabulary
        grammar = gbnf_of(schema).text.encode()
        self._sampler = llama_cpp.llama_sampler_init_grammar(vocabulary.vocab, grammar, b"root")

    def check(self, tokens: list[int]) -> list[bool]:
        """Which of the tokens may be next."""
        rows = np.zeros(len(tokens), dtype=np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)]))
        rows["id"] = tokens
        data = rows.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        array = llama_cpp.llama_token_data_array(data=data, size=len(rows), selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return np.isfinite(rows["logit"]).tolist()

    def accept(self, token: int) -> None:
        llama_cpp.llama_sampler_accept(self._sampler, token)


class Guidance:
    """llguidance's."""

    def __init__(self, vocabulary: Vocabulary, schema: object) -> None:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": True})
        self._matcher = llguidance.LLMatcher(vocabulary.guide, grammar)
        self.error = self._matcher.get_error()
        self._mask = llguidance.numpy.allocate_token_bitmask(1, vocabulary.n)

    def mask(self) -> None:
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask, 0)

    def allows(self, token: int) -> bool:
        return bool(self._mask[0, token // 32] >> (token % 32) & 1)

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)


def measure(vocabulary: Vocabulary, schema: object, right: object, wrong: object, n_repeats: int) -> list[str]:
    """A row of the table."""
    everything = list(range(vocabulary.n))
    making, checking, masking, making_guide, guiding = (Clock() for _ in range(5))
    verdicts = []
    for answer in (right, wrong, *[right] * (n_repeats - 1)):
        with making:
            ours = Ours(vocabulary, schema)
        with making_guide:
            guide = Guidance(vocabulary, schema)
        is_ours, is_guide = True, not guide.error
        for token in vocabulary.tokens(answer):
            if is_ours:
                with checking:
                    (is_ours,) = ours.check([token])
            if is_ours:
                if answer is right:
                    with masking:
                        ours.check(everything)
                ours.accept(token)
            if is_guide:
                with guiding:
                    guide.mask()
                is_guide = guide.allows(token)
                guide.accept(token)
        verdicts.append((is_ours, is_guide))
    said = ["no" if not verdicts[0][i] else "lets the wrong one through" if verdicts[1][i] else "right" for i in (0, 1)]
    made = [f"{median(clock.us) / 1e3:.1f}" for clock in (making, making_guide)]
    return [*said, *made, *(f"{median(clock.us):.0f}" for clock in (checking, masking, guiding))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print_machine()
    vocabulary = Vocabulary(given.model or str(embedded_model()))
    print(f"llguidance {llguidance.__version__}, {vocabulary.n} tokens\n")
    heads = [
        "schema",
        "ours",
        "llguidance",
        "to make, ms: ours",
        "llguidance",
        "a token, us: ours, one",
        "all",
        "llguidance, all",
    ]
    print(markdown(heads, [[name, *measure(vocabulary, *case, given.repeats)] for name, case in CASES.items()]))


if __name__ == "__main__":
    main()
