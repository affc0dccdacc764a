"""The proof of `doctor --prove`: what was compared bit by bit on one machine with one model, and the verdict.

Here are the results, their texts and their page; `proving.py` computes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2

from pyfly_cpp._version import __version__
from pyfly_cpp.errors import counted

_TEMPLATES = Path(__file__).with_name("templates")
_FAR = 0.25
"""Beyond this share of their spread, logits are not apart by rounding alone: in Q4_K_M that is 0.04
(benchmarks/records/proof-q4_k_m-zen4.json.gz)."""
_MOST_NAMED = 4
"""Most prompts that a line names one by one."""


@dataclass(frozen=True)
class Answered:
    """An answer to the last bit."""

    tokens: tuple[int, ...]
    rows: tuple[bytes, ...]
    """For each token a digest of the logits that it was chosen by, 16 bytes."""

    def __add__(self, other: Answered) -> Answered:
        return Answered(self.tokens + other.tokens, self.rows + other.rows)

    def first(self, n: int) -> Answered:
        """Its first n tokens."""
        return Answered(self.tokens[:n], self.rows[:n])


@dataclass(frozen=True)
class TypeProducts:
    """The products of the model with one type of weights, and such a product by itself, 1 to 32 rows of it against
    each row alone."""

    type: str
    """ggml's name of the type."""
    is_ours: bool
    """Whether our kernels compute them."""
    n: int
    """How many the model has."""
    differ: tuple[int, ...] | None
    """Numbers of rows that gave another bit; None: not tried, because there is no trial of this type."""

    @property
    def text(self) -> str:
        """In words."""
        whose = f"{counted(self.n, 'product')}, {'ours' if self.is_ours else 'by llama.cpp'}"
        if self.differ is None:
            return f"{whose}; not tried by itself"
        same = "1 to 32 rows have the bits of one row"
        return f"{whose}; {f'another bit with {ranges(self.differ)} rows' if self.differ else same}"


@dataclass(frozen=True)
class WholeBatches:
    """The model's logits for tokens that were evaluated in batches, against the same tokens one by one."""

    n_most: int
    """Size of the largest batch. All smaller sizes were tried as well."""
    differ: tuple[int, ...]
    """Sizes of batches that gave another bit."""
    largest: float
    """The largest difference of a logit."""

    @property
    def text(self) -> str:
        """In words."""
        if not self.differ:
            return f"1 to {self.n_most} tokens have the bits of one token"
        return f"another bit in batches of {ranges(self.differ)} tokens; logits differ by up to {self.largest:.2g}"


@dataclass(frozen=True)
class AgainstStock:
    """The model's logits with our kernels, against those with llama.cpp's. They round differently, but a fault of ours
    that all batches share shows here alone."""

    n: int
    """Tokens behind each of which the logits were compared."""
    n_same: int
    """Of them, those with the same most probable next token."""
    apart: float
    """The root mean square of the differences, as a share of the standard deviation of llama.cpp's logits: the median
    of the tokens. NaN if a logit is."""

    @property
    def is_far(self) -> bool:
        """Whether that is more than rounding does."""
        return not self.apart <= _FAR

    @property
    def text(self) -> str:
        """In words."""
        why = "more than by rounding" if self.is_far else "by rounding"
        return f"{self.n_same} of {self.n} next tokens the same; logits {self.apart:.1%} apart, {why}"


@dataclass(frozen=True)
class Way:
    """A way of computing the answers, compared with plain decoding."""

    name: str
    n: int = 0
    """Answers that were compared."""
    other_tokens: tuple[str, ...] = ()
    """The prompts whose answers have another token."""
    other_logits: tuple[str, ...] = ()
    """The prompts whose answers have the same tokens, chosen by other logits."""
    n_drafted: int = 0
    """Tokens that were drafted."""
    n_accepted: int = 0
    """Of them, those that were kept."""
    seconds: float = 0.0
    left_out: str = ""
    """The reason why it was not tried; empty if it was."""
    is_required: bool = False
    """Whether its drafter was asked for or belongs to the model, so that it has to be tried and to draft."""

    @classmethod
    def compared(cls, name: str, plain: Mapping[str, Answered], answers: Mapping[str, Answered]) -> Way:
        """The comparison of answers, by prompt."""
        tokens = tuple(key for key, one in answers.items() if one.tokens != plain[key].tokens)
        rows = tuple(key for key, one in answers.items() if key not in tokens and one.rows != plain[key].rows)
        return cls(name, len(answers), tokens, rows)

    @property
    def lacking(self) -> str:
        """Why a drafter that is required shows nothing; empty if it was tried and drafted."""
        if not self.is_required or self.n_drafted:
            return ""
        return f"not tried: {self.left_out}" if self.left_out else "drafted no token"

    @property
    def text(self) -> str:
        """In words."""
        if self.left_out:
            return f"not tried: {self.left_out}"
        n_other = len(self.other_tokens) + len(self.other_logits)
        said = f"{self.n - n_other} of {self.n} answers the same to the last bit"
        for what, names in (("other tokens", self.other_tokens), ("other logits", self.other_logits)):
            if names:
                more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
                said += f"; {what} in {', '.join(names[:_MOST_NAMED])}{more}"
        return said + (f"; {self.n_accepted} of {self.n_drafted} drafts accepted" if self.n_drafted else "")


@dataclass(frozen=True)
class Proof:
    """All that was compared."""

    n_answers: int
    """Prompts that were answered in each way."""
    max_tokens: int
    """The longest answer, in tokens."""
    n_sampled: int
    """Answers that were drawn at a temperature, each with a seed; the others took the most probable tokens."""
    products: tuple[TypeProducts, ...]
    batches: WholeBatches
    ways: tuple[Way, ...]
    reasons: tuple[str, ...] | None
    """Why a batch may change the bits: what our kernels do not compute. None: llama.cpp does not show it."""
    seconds: float = 0.0
    stock: AgainstStock | None = None
    """None: not compared, because none of our kernels is used."""

    @property
    def other(self) -> tuple[str, ...]:
        """The prompts whose answers differed in some way."""
        found = [name for way in self.ways for name in (*way.other_tokens, *way.other_logits)]
        return tuple(dict.fromkeys(found))

    @property
    def has_differences(self) -> bool:
        """Whether anything differed: an answer, a batch, or a product of our kernels."""
        is_wrong = any(one.is_ours and one.differ for one in self.products)
        is_far = self.stock is not None and self.stock.is_far
        return bool(self.other or self.batches.differ or is_wrong or is_far)

    @property
    def is_exact(self) -> bool:
        """Whether nothing differed, nothing is known to be computed that could, and every drafter that is required was
        tried."""
        return not (self.has_differences or self.reasons or self.lacking)

    @property
    def lacking(self) -> tuple[str, ...]:
        """The required drafters that show nothing, each with the reason."""
        return tuple(f"{way.name} ({way.lacking})" for way in self.ways if way.lacking)

    @property
    def verdict(self) -> str:
        """The result in one line, without a full stop."""
        tried = [way for way in self.ways if not way.left_out]
        n = sum(way.n for way in tried)
        if self.is_exact:
            unknown = "; llama.cpp does not show whether all products are ours" if self.reasons is None else ""
            return (
                f"exact here: {counted(n, 'answer')} in {counted(len(tried), 'way')} have the bits of plain decoding, "
                f"and batches of 1 to {self.batches.n_most} tokens those of one token{unknown}"
            )
        if self.stock is not None and self.stock.is_far:
            return (
                f"wrong here: with our kernels the logits are {self.stock.apart:.0%} from llama.cpp's, more than by "
                "rounding; use --kernels stock, and please report this"
            )
        lacking = f"not all compared: {', '.join(self.lacking)}" if self.lacking else ""
        if not (self.has_differences or self.reasons):
            return lacking
        if self.reasons is None:
            why = "llama.cpp does not show what computes the products"
        elif not self.reasons:
            why = "although all products are ours: please report this"
        else:
            why = f"not ours: {'; '.join(self.reasons)}"
        n_tokens = len({name for way in self.ways for name in way.other_tokens})
        shown = f"it showed in {len(self.other)} of {counted(self.n_answers, 'answer')}"
        shown += f", in {n_tokens} of them in the tokens" if self.other else ""
        shown += f", and in batches of {ranges(self.batches.differ)} tokens" if self.batches.differ else ""
        wrong = [one.type for one in self.products if one.is_ours and one.differ]
        shown += f"; our products by {', '.join(wrong)} differ by themselves" if wrong else ""
        return f"not always exact here, {why}; {shown}" + (f"; {lacking}" if lacking else "")

    def rows(self) -> list[tuple[str, str]]:
        """What was compared and what came of it, for people."""
        by_type = [(f"weights in {one.type}", one.text) for one in self.products]
        stock = [] if self.stock is None else [("llama.cpp's kernels", self.stock.text)]
        return [*by_type, ("batches", self.batches.text), *stock, *((way.name, way.text) for way in self.ways)]

    def as_dict(self) -> dict[str, Any]:
        """All fields and the verdict, fit for JSON."""
        return {**asdict(self), "is_exact": self.is_exact, "verdict": self.verdict}


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: `2, 5 and 9 to 32`."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] + 1 == n:
            parts[-1].append(n)
        else:
            parts.append([n])
    words = [f"{one[0]} to {one[-1]}" if len(one) > 2 else " and ".join(map(str, one)) for one in parts]
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1] if words else ""


def render(proof: Proof, facts: Sequence[tuple[str, str]]) -> str:
    """The proof as one self-contained HTML page without scripts. `facts`: names and texts of what it is of."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("proof.html").render(proof=proof, facts=facts, version=__version__)
