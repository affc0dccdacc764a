"""Computes the proof of `doctor --prove`: the same answers in many ways, the same tokens in batches of all sizes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama import StoppingCriteriaList
from typing_extensions import Self

from pyfly_cpp import _native
from pyfly_cpp.decoding.drafters import AnyDrafter
from pyfly_cpp.engine.request import Request
from pyfly_cpp.engine.stats import Stats
from pyfly_cpp.errors import NativeError, PyflyError
from pyfly_cpp.llama.fly_batch import FlyBatch
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.llama.prompting import render_chat
from pyfly_cpp.machine import exactness
from pyfly_cpp.measure.proof import AgainstStock, Answered, Proof, TypeProducts, Way, WholeBatches

_TEMPERATURE = 0.7
"""That of every fourth answer; the others take the most probable tokens."""
_N_ROWS = 32
"""Tokens of the largest batch that is compared with single ones."""
_N_BEHIND = 16
"""Tokens that stand before them."""
_N_STOCK = 64
"""Tokens behind which logits are compared with those of llama.cpp's kernels, at most."""
_N_OUT = 256
"""Outputs of the matrix of a product that is tried by itself."""
_N_KNOWN = 10
"""Most tokens of a draft with a mistake."""
_N_AT_ONCE = 8

Tell = Callable[[str, int, int], None]
"""Called with what is being computed, and how much of how much is done."""


@dataclass(frozen=True)
class Question:
    """A prompt, and how it is answered: the same in every way."""

    id: str
    tokens: tuple[int, ...]
    temperature: float
    seed: int


def questions_of(llm: FlyLlama, prompts: Mapping[str, str], max_tokens: int) -> list[Question]:
    """Texts by their names as questions: messages of a chat, cut to what the context holds besides an answer. A model
    without a vocabulary gets random tokens instead."""
    kind = llama_cpp.llama_vocab_type(llama_cpp.llama_model_get_vocab(llm.model))
    n_room, random = max(1, llm.n_ctx() - max_tokens - 1), np.random.default_rng(1)
    questions = []
    for i, (name, text) in enumerate(prompts.items()):
        if kind != llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            tokens = render_chat(llm, [{"role": "user", "content": text}]).tokens
        else:
            tokens = random.integers(1, llm.n_vocab(), 12 + 5 * (i % 9)).tolist()
        temperature = _TEMPERATURE if i % 4 == 3 else 0.0
        questions.append(Question(name, tuple(tokens[:n_room]), temperature, i))
    return questions


class KnownAnswers:
    """Drafts the known continuation of each text, with a wrong token at every depth in turn, so that a step keeps any
    number of drafts from none to all."""

    def __init__(self, texts: Sequence[Sequence[int]], n_vocab: int) -> None:
        self._texts = [list(text) for text in texts]
        self._n_vocab = n_vocab
        self._calls = itertools.count()

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **_: Any) -> npt.NDArray[np.intc]:
        text = [int(token) for token in input_ids]
        draft = next((one[len(text) :] for one in self._texts if one[: len(text)] == text), [])[:_N_KNOWN]
        depth = next(self._calls) % (_N_KNOWN + 1)
        if depth < len(draft):
            draft[depth] = (draft[depth] + 1) % self._n_vocab
        return np.array(draft, dtype=np.intc)


def prove(
    load: Callable[..., Any],
    prompts: Mapping[str, str],
    drafters: Mapping[str, AnyDrafter],
    *,
    first: AnyDrafter,
    max_tokens: int,
    n_threads: int,
    left_out: Mapping[str, str] = {},
    required: Collection[str] = (),
    tell: Tell = lambda *_: None,
) -> Proof:
    """Compares everything with plain decoding. One model is open at a time, and closed in the end.

    Args:
        load: Called with `FlyLlama` or `FlyBatch`, positional arguments behind the path, and further arguments, of
            which `n_threads` is for batches as well, and `kernels` may be "stock"; loads the model.
        prompts: Texts by their names, at least one.
        drafters: Drafters by the names of their ways. One that cannot be opened is left out, with the reason.
        first: What the model is loaded with: its own MTP head, if `drafters` has that.
        max_tokens: Longest answer, >= 2.
        n_threads: Threads of all ways but one, which takes one thread, or two if this is 1.
        left_out: Further ways that cannot be tried, with the reasons.
        required: Ways, of both, without which the proof is not exact: they have to be tried and to draft.

    Raises:
        ValueError, PyflyError: the model cannot be loaded or evaluated.
    """
    begun = time.monotonic()
    with load(FlyLlama, drafter=first, adaptive=False, n_threads=n_threads) as llm:
        questions = questions_of(llm, prompts, max_tokens)
        longest = max((one.tokens for one in questions), key=len)
        products, reasons = _products(llm, n_threads)
        batches = compare_batches(llm, longest, tell)
        ours = logits_of(llm, longest[:_N_STOCK]) if any(one.is_ours for one in products) else None
        compared = _Compared(llm, questions, max_tokens, tell)
        compared.ways_with(llm, drafters)
        n_ctx, known = llm.n_ctx(), compared.known_answers()
    stock = None
    if ours is not None:
        tell("llama.cpp's kernels", 0, 1)
        with load(FlyLlama, drafter=None, n_threads=n_threads, kernels="stock") as llm:
            stock = compare_with_stock(ours, logits_of(llm, longest[:_N_STOCK]))
    n_other = 1 if n_threads > 1 else 2
    with load(FlyLlama, drafter=None, n_threads=n_other) as llm:
        compared.way(llm, f"{n_other} thread{'s' * (n_other > 1)}", None)
    n_cells = max(n_ctx, _N_AT_ONCE * (len(longest) + max_tokens + _N_KNOWN))
    sizes = {"n_ctx": n_ctx, "n_cells": n_cells, "n_threads": n_threads}
    with load(FlyBatch, _N_AT_ONCE, drafter=known, adaptive=False, **sizes) as batch:
        for name, draft_max in ((f"{_N_AT_ONCE} requests", 0), (f"{_N_AT_ONCE} requests, drafts", None)):
            compared.way_of_many(batch, name, draft_max)
    n_sampled = sum(one.temperature > 0 for one in questions)
    tried = (*compared.ways, *(Way(name, left_out=why) for name, why in left_out.items()))
    ways = tuple(replace(way, is_required=way.name in required) for way in tried)
    seconds = round(time.monotonic() - begun, 1)
    return Proof(len(questions), max_tokens, n_sampled, products, batches, ways, reasons, seconds, stock)


# ---- Products and batches --------------------------------------------------------------------------------------------


def _products(llm: FlyLlama, n_threads: int) -> tuple[tuple[TypeProducts, ...], tuple[str, ...] | None]:
    """Products by the type of their weights, each tried by itself, and why bits may depend on a batch."""
    try:
        found, reasons = _native.graph_products(llm.ctx), exactness.reasons(llm.ctx)
    except NativeError:
        return (), None
    numbers: dict[tuple[str, int, bool], int] = {}
    for one in found:
        if one.weights and not one.weights.startswith(("cache_", "attn_inp_")):  # of the model or an adapter
            key = one.type, one.number, one.is_ours
            numbers[key] = numbers.get(key, 0) + one.n
    known = _native.kernel_types()
    return tuple(
        TypeProducts(name, is_ours, n, _native.batches_with_other_bits(number, _N_OUT, n_threads, is_ours=is_ours)
                     if number in known else None)
        for (name, number, is_ours), n in numbers.items()
    ), reasons  # fmt: skip


def compare_with_alone(
    evaluate: Callable[[Sequence[int]], npt.NDArray[np.single]], n_most: int, tell: Tell = lambda *_: None
) -> WholeBatches:
    """Compares the logits of tokens alone with those of the same tokens in batches of 1 to n_most.

    Args:
        evaluate: Evaluates batches of these sizes, the first ones of the same n_most tokens behind the same beginning.
            Returns the logits of their tokens, [sum of sizes][vocabulary].
    """
    alone, differ, largest = evaluate([1] * n_most), [], 0.0
    for n in range(1, n_most + 1):
        tell("batches", n, n_most)
        together = evaluate([n])
        if not np.array_equal(together.view(np.uint32), alone[:n].view(np.uint32)):
            differ.append(n)
            largest = max(largest, float(np.nanmax(np.abs(together - alone[:n]))))
    return WholeBatches(n_most, tuple(differ), largest)


class _Texts:
    """Evaluates a text on the model's context, which is empty before and afterwards."""

    def __init__(self, llm: FlyLlama, text: Sequence[int]) -> None:
        self._llm, self._text = llm, text
        self._memory = llama_cpp.llama_get_memory(llm.ctx)

    def __enter__(self) -> Self:
        self._batch = llama_cpp.llama_batch_init(self._llm.n_batch, 0, 1)
        self.clear()
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_batch_free(self._batch)
        self.clear()
        self._llm.reset()

    def clear(self) -> None:
        """Begins anew."""
        llama_cpp.llama_memory_clear(self._memory, True)

    def rows(self, begin: int, end: int) -> npt.NDArray[np.single]:
        """The logits of tokens [begin, end), at most a batch, behind those before: [end - begin][vocabulary]. Raises
        NativeError if llama.cpp cannot evaluate them."""
        batch, llm = self._batch, self._llm
        batch.n_tokens = end - begin
        for i, position in enumerate(range(begin, end)):
            batch.token[i], batch.pos[i], batch.logits[i] = self._text[position], position, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if llama_cpp.llama_decode(llm.ctx, batch) != 0:
            raise NativeError(f"llama.cpp could not evaluate a batch of {end - begin} tokens.")
        shape = (end - begin, llm.n_vocab())
        logits: npt.NDArray[np.single] = np.ctypeslib.as_array(llama_cpp.llama_get_logits(llm.ctx), shape=shape)
        return np.array(logits, np.single)  # a copy: the next batch overwrites them

    def all(self, n: int) -> npt.NDArray[np.single]:
        """The logits of the first n tokens, in batches that are as large as possible."""
        size = self._llm.n_batch
        return np.concatenate([self.rows(begin, min(begin + size, n)) for begin in range(0, n, size)])


def compare_batches(llm: FlyLlama, tokens: Sequence[int], tell: Tell = lambda *_: None) -> WholeBatches:
    """Evaluates tokens one by one and in batches of 1 to 32, always behind the same ones. The sequence is empty
    afterwards. Raises NativeError if llama.cpp cannot evaluate them."""
    n_most = min(_N_ROWS, llm.n_batch, llm.n_ctx() - _N_BEHIND)
    text = list(itertools.islice(itertools.cycle(tokens), _N_BEHIND + n_most))
    with _Texts(llm, text) as texts:

        def behind(sizes: Sequence[int]) -> npt.NDArray[np.single]:
            texts.clear()
            texts.all(_N_BEHIND)
            ends = list(itertools.accumulate(sizes, initial=_N_BEHIND))
            return np.concatenate([texts.rows(*span) for span in zip(ends, ends[1:])])

        return compare_with_alone(behind, n_most, tell)


def logits_of(llm: FlyLlama, tokens: Sequence[int]) -> npt.NDArray[np.single]:
    """The logits behind each token of a text, [len(tokens)][vocabulary]. The sequence is empty afterwards. Raises
    NativeError if llama.cpp cannot evaluate it."""
    with _Texts(llm, tokens) as texts:
        return texts.all(len(tokens))


def compare_with_stock(ours: npt.NDArray[np.single], theirs: npt.NDArray[np.single]) -> AgainstStock:
    """Logits with our kernels and with llama.cpp's, [tokens][vocabulary]. What shifts all logits of a token alike does
    not count, as in a softmax."""
    a, b = (one - one.mean(axis=1, keepdims=True) for one in (ours.astype(np.float64), theirs.astype(np.float64)))
    apart = np.sqrt(((a - b) ** 2).mean(axis=1) / np.maximum((b**2).mean(axis=1), np.finfo(np.single).tiny))
    n_same = int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())
    return AgainstStock(len(ours), n_same, float(np.median(apart)))


# ---- Answers ---------------------------------------------------------------------------------------------------------


class _Asked:
    """A question as a request, and what was chosen by which logits."""

    def __init__(self, llm: Any, question: Question, max_tokens: int, begun: Sequence[int] = ()) -> None:
        """`begun`: tokens that the answer begins with."""
        self._rows: dict[int, bytes] = {}
        self._n_prompt = len(question.tokens) + len(begun)
        prompt = [*question.tokens, *begun]
        self.request: Request = llm.new_request(
            prompt,
            llm.new_output(prompt, (), max_tokens),
            sampling={"temp": question.temperature},
            stopping_criteria=StoppingCriteriaList([self._see]),
        )

    def _see(self, tokens: npt.NDArray[np.intc], row: npt.NDArray[np.single]) -> bool:
        """Called with the logits that the next token was chosen by."""
        self._rows[len(tokens)] = blake2b(row.tobytes(), digest_size=16).digest()
        return False

    @property
    def answer(self) -> Answered:
        """The answer, when it has ended."""
        tokens = self.request.tokens
        return Answered(tuple(tokens), tuple(self._rows[self._n_prompt + i] for i in range(len(tokens))))

    @property
    def has_ended_itself(self) -> bool:
        """Whether it ended before its limit of tokens."""
        return self.request.output is not None and self.request.output.cause == "eog"


def _ask(llm: FlyLlama, question: Question, max_tokens: int, begun: Sequence[int] = ()) -> _Asked:
    llm.set_seed(question.seed)
    asked = _Asked(llm, question, max_tokens, begun)
    llm.run(asked.request)
    return asked


class _Compared:
    """Plain answers, and the ways that were compared with them."""

    def __init__(self, llm: FlyLlama, questions: Sequence[Question], max_tokens: int, tell: Tell) -> None:
        """Answers the questions plainly, each from an empty context."""
        self._questions, self._max_tokens, self._tell = questions, max_tokens, tell
        self._n_vocab = llm.n_vocab()
        self.ways: list[Way] = []
        llm.drafter = None

        def anew(question: Question, _: int) -> Answered:
            llm.reset()
            return _ask(llm, question, max_tokens).answer

        self._plain = self._answers("plain", anew)

    def known_answers(self) -> KnownAnswers:
        """A drafter that knows them."""
        texts = [[*question.tokens, *self._plain[question.id].tokens] for question in self._questions]
        return KnownAnswers(texts, self._n_vocab)

    def ways_with(self, llm: FlyLlama, drafters: Mapping[str, AnyDrafter]) -> None:
        """One request at a time, with drafts, and from saved states."""

        def restored(question: Question, i: int) -> Answered:
            n = 0 if question.temperature else self._max_tokens // 2  # a seed begins with its answer
            asked = _ask(llm, question, max(n, 1))
            if asked.has_ended_itself:
                return asked.answer
            state = llm.save_state()
            _ask(llm, self._questions[i - 1], 2)
            llm.load_state(state)
            first = asked.answer.first(n)
            return first + _ask(llm, question, self._max_tokens - n, first.tokens).answer

        for name, drafter in drafters.items():
            self.way(llm, name, drafter)
        known = self.known_answers()
        self.way(llm, "drafts with mistakes", known)
        self.way(llm, "saved and restored", known, restored)

    def way(
        self,
        llm: FlyLlama,
        name: str,
        drafter: AnyDrafter | None,
        how: Callable[[Question, int], Answered] | None = None,
    ) -> None:
        """One request at a time; left out, with the reason, if the drafter cannot be opened."""
        begun = time.monotonic()
        try:
            llm.drafter = drafter
        except (ValueError, PyflyError, MemoryError) as error:
            self.ways.append(Way(name, left_out=f"{error}".rstrip(".")))
            return
        llm.reset()
        llm.reset_stats()
        answers = self._answers(name, how or (lambda question, _: _ask(llm, question, self._max_tokens).answer))
        self._add(name, answers, llm.stats, begun)

    def way_of_many(self, batch: FlyBatch, name: str, draft_max: int | None) -> None:
        """All requests on a batch; `draft_max`: as of `Decoding`."""
        begun = time.monotonic()
        batch.reset_stats()
        decoding = batch.decoding.but(draft_max=draft_max)
        running = []
        for question in self._questions:
            one = _Asked(batch.llama, question, self._max_tokens)
            running.append((one, batch.write(one.request, seed=question.seed, decoding=decoding)))

        def finished(_: Question, i: int) -> Answered:
            asked, handle = running[i]
            handle.result()
            return asked.answer

        self._add(name, self._answers(name, finished), batch.stats, begun)

    def _answers(self, name: str, how: Callable[[Question, int], Answered]) -> dict[str, Answered]:
        answers = {}
        for i, question in enumerate(self._questions):
            self._tell(name, i, len(self._questions))
            answers[question.id] = how(question, i)
        return answers

    def _add(self, name: str, answers: Mapping[str, Answered], stats: Stats, begun: float) -> None:
        n_accepted, seconds = stats.matched + stats.loose_accepted, round(time.monotonic() - begun, 1)
        way = Way.compared(name, self._plain, answers)
        self.ways.append(replace(way, n_drafted=stats.drafted, n_accepted=n_accepted, seconds=seconds))
