"""The proof of `doctor --prove`: it finds every difference, and says exact only where there is none and can be none."""

from __future__ import annotations

import html.parser
import json
import platform
from dataclasses import replace

import llama_cpp
import numpy as np
import pytest
from described import POPULAR, make

from pyfly_cpp import DraftModel, FlyBatch, FlyLlama, PromptLookup, _native
from pyfly_cpp.machine import kernels
from pyfly_cpp.measure.proof import Answered, Proof, TypeProducts, Way, WholeBatches, ranges, render
from pyfly_cpp.measure.proving import KnownAnswers, compare_with_stock, prove

needs_kernels = pytest.mark.skipif(kernels._WHY_NOT is not None, reason=f"no kernels: {kernels._WHY_NOT}")

PROMPTS = {
    "sum": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "list": "One two three one two three one two",
    "code": "def add(a, b):\n    return",
    "long": "Tom has 3 apples and 4 pears. He eats 2 apples. " * 8,
}


def proof_of(path, prompts=PROMPTS, max_tokens=8, drafters=None, left_out=None, required=(), **options):
    opened = []

    def load(kind, *more, **arguments):
        assert not any(vars(one)["_access"].is_closed is False for one in opened if isinstance(one, FlyLlama))
        given = {"n_ctx": 256, "verbose": False, **options, **arguments}
        opened.append(kind(path, *more, n_threads_batch=given["n_threads"], **given))
        return opened[-1]

    lookup = PromptLookup()
    drafters = {"lookup": lookup, **(drafters or {})}
    more = {"left_out": left_out or {}, "required": required}
    return prove(load, prompts, drafters, first=lookup, max_tokens=max_tokens, n_threads=1, **more)


# ---- The verdict -----------------------------------------------------------------------------------------------------

SAME = WholeBatches(32, (), 0.0)
OURS = TypeProducts("q4_K", True, 7, ())


def answered(*tokens, rows=b"abcdefgh"):
    return Answered(tokens, tuple(rows[i : i + 1] for i in range(len(tokens))))


def made(**changes):
    fields = {"n_answers": 2, "max_tokens": 4, "n_sampled": 0, "products": (OURS,), "batches": SAME,
              "ways": (Way("lookup", 2),), "reasons": ()}  # fmt: skip
    return Proof(**{**fields, **changes})


def test_answers_are_compared_by_tokens_and_by_all_bits():
    plain = {"a": answered(1, 2, 3), "b": answered(4, 5, 6), "c": answered(7, 8)}
    way = Way.compared("w", plain, {"a": answered(1, 2, 3), "b": answered(4, 9, 6), "c": answered(7, 8, rows=b"xy")})
    assert (way.n, way.other_tokens, way.other_logits) == (3, ("b",), ("c",))
    assert Way.compared("w", plain, plain) == Way("w", 3)
    assert Way.compared("w", plain, {**plain, "a": answered(1, 2)}).other_tokens == ("a",)


@pytest.mark.parametrize(
    "changes",
    [
        {"reasons": ("a LoRA adapter is loaded",)},
        {"batches": WholeBatches(32, (2, 5), 0.25)},
        {"ways": (Way("lookup", 2, ("a",)),)},
        {"ways": (Way("lookup", 2, (), ("a",)),)},
        {"products": (TypeProducts("q4_K", True, 7, (3,)),)},
    ],
)
def test_whatever_differs_or_could_is_not_exact(changes):
    proof = made(**changes)
    assert not proof.is_exact and proof.verdict.startswith("not ")
    assert all(why in proof.verdict for why in changes.get("reasons", ()))
    assert bool(proof.reasons) or "report" in proof.verdict


def test_exact_is_what_has_no_difference():
    others = TypeProducts("f32", False, 1, (4, 5))  # by llama.cpp, in a matrix that no product of the graph has
    for changes in ({}, {"reasons": None}, {"products": (OURS, others)}, {"ways": (Way("x", left_out="no file"),)}):
        proof = made(**changes)
        assert proof.is_exact and proof.verdict.startswith("exact here")
    assert "does not show" in made(reasons=None).verdict


def test_a_difference_is_no_error_of_ours_where_it_is_not_known_what_computes():
    proof = made(reasons=None, products=(), batches=WholeBatches(32, (2,), 0.5))
    assert not proof.is_exact and "does not show" in proof.verdict and "ours" not in proof.verdict


def test_a_required_drafter_has_to_draft():
    for way in (Way("mine", left_out="no file"), Way("mine", 2)):
        assert made(ways=(way,)).is_exact
        for reasons in ((), None, ("a LoRA adapter is loaded",)):
            proof = made(ways=(Way("lookup", 2), replace(way, is_required=True)), reasons=reasons)
            assert not proof.is_exact and "mine (" in proof.verdict and way.left_out in proof.verdict
            assert ("not always" in proof.verdict) == bool(reasons)
    assert made(ways=(Way("mine", 2, n_drafted=1, is_required=True),)).is_exact


def test_a_difference_is_counted_once_for_each_answer():
    ways = (Way("lookup", 2, ("a",), ("b",)), Way("eight", 2, (), ("a",)))
    assert made(ways=ways).other == ("a", "b") and "in 2 of 2 answers, in 1 of them" in made(ways=ways).verdict


def test_logits_that_are_far_from_those_of_the_stock_kernels_are_wrong():
    theirs = np.random.default_rng(0).normal(size=(5, 100)).astype(np.single)
    noise = np.random.default_rng(1).normal(size=(5, 100)).astype(np.single)
    near = compare_with_stock(theirs + 0.01 * noise + np.single(3.0), theirs)  # a shift changes no probability
    assert near.n_same >= 4 and 0.005 < near.apart < 0.02 and made(stock=near).is_exact
    nothing = np.full_like(theirs, np.nan)
    for wrong in (compare_with_stock(noise, theirs), compare_with_stock(nothing, theirs)):
        proof = made(stock=wrong)
        assert not proof.is_exact and proof.has_differences and "stock" in proof.verdict and "report" in proof.verdict
    assert [text for name, text in made(stock=near).rows() if "llama.cpp" in name]


def test_ranges_in_words():
    assert [ranges(n) for n in ((), (2,), (2, 3), (1, 2, 3), (2, 5, 9, 10, 11, 12))] == [
        "", "2", "2 and 3", "1 to 3", "2, 5 and 9 to 12",
    ]  # fmt: skip


def test_the_page_is_escaped_and_loads_nothing():
    class Parser(html.parser.HTMLParser):
        tags, links = [], []

        def handle_starttag(self, tag, attributes):
            self.tags.append(tag)
            self.links += [value for name, value in attributes if name in ("src", "href")]

    text = render(made(ways=(Way("<b>", 2, ("<script>",)),)), [("model", "<i>.gguf")])
    Parser().feed(text)
    assert "script" not in Parser.tags and "i" not in Parser.tags and not Parser.links
    assert "default-src 'none'" in text and "&lt;i&gt;.gguf" in text
    json.dumps(made().as_dict())


# ---- On models -------------------------------------------------------------------------------------------------------


@pytest.fixture
def every_type(monkeypatch):
    """Whatever is faster on this machine: all types are packed if a model asks for kernels."""
    everything = kernels.KernelVerdict(tuple(_native.kernel_types()), True, "every type")
    monkeypatch.setattr(kernels, "verdict", lambda: everything)


@needs_kernels
@pytest.mark.alike
def test_the_tiny_model_is_exact(every_type, tiny_target, tiny_draft):
    proof = proof_of(tiny_target, drafters={"draft": DraftModel(tiny_draft), "none": DraftModel("none.gguf")})
    assert proof.is_exact, proof.verdict
    by_name = {way.name: way for way in proof.ways}
    assert list(by_name) == [
        "lookup", "draft", "none", "drafts with mistakes", "saved and restored", "2 threads", "8 requests",
        "8 requests, drafts",
    ]  # fmt: skip
    assert by_name["none"].left_out and all(way.n == 4 for name, way in by_name.items() if name != "none")
    for name in ("draft", "drafts with mistakes", "saved and restored", "8 requests, drafts"):
        assert 0 < by_name[name].n_accepted < by_name[name].n_drafted, name
    assert proof.n_sampled == 1 and proof.batches.n_most == 32
    assert [(one.type, one.is_ours, one.differ) for one in proof.products] == [("f16", True, ())]
    assert proof.stock.n_same == proof.stock.n == 64 and 0 < proof.stock.apart < 0.01


def test_a_required_drafter_that_cannot_be_opened_is_named(tiny_target):
    given = {"drafters": {"none": DraftModel("none.gguf")}, "left_out": {"other": "unfit"}}
    proof = proof_of(tiny_target, dict(list(PROMPTS.items())[:2]), 2, required=("none", "other"), **given)
    assert not proof.is_exact and "none (" in proof.verdict and "other (" in proof.verdict
    assert {way.name for way in proof.ways if way.is_required} == {"none", "other"}


@needs_kernels
@pytest.mark.alike
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="whose batches round differently")
def test_kernels_that_round_by_the_batch_are_found(tiny_target):
    """llama.cpp's own, with the weights in a type that it multiplies differently from some size of the batch on."""
    proof = proof_of(tiny_target, kernels="stock", flash_attn=True)
    assert not proof.is_exact and proof.reasons
    assert proof.batches.differ and proof.batches.largest > 0 and proof.other
    assert all(not one.is_ours for one in proof.products) and proof.stock is None


@needs_kernels
@pytest.mark.alike
def test_what_is_not_ours_is_named(every_type, tiny_target, lora):
    proof = proof_of(tiny_target, lora_path=lora)
    assert not proof.is_exact and "LoRA" in proof.verdict
    proof = proof_of(tiny_target, flash_attn=True, type_k=llama_cpp.GGML_TYPE_Q8_0, type_v=llama_cpp.GGML_TYPE_Q8_0)
    assert proof.is_exact, proof.verdict


@needs_kernels
@pytest.mark.alike
@pytest.mark.parametrize("name", ["qwen35", "gemma3"])
def test_models_without_a_vocabulary_get_random_tokens(every_type, name, tmp_path):
    """A recurrent memory, and a sliding window that is shorter than the prompts."""
    path = make(name, POPULAR[name], tmp_path / "model.gguf")
    proof = proof_of(str(path), prompts=dict.fromkeys(map(str, range(4)), ""))
    assert not proof.other and not proof.batches.differ, proof.verdict
    assert proof.n_answers == 4 and all(way.n == 4 for way in proof.ways)


def test_a_difference_in_one_bit_is_found(tiny_target, monkeypatch):
    """Of one logit of one row, in one way."""
    write = FlyBatch.write

    def disturbed(batch, request, **more):
        read = request.read_step

        def read_step(*arguments):
            committed = read(*arguments)
            committed[0].row.view(np.uint32)[7] ^= 1
            return committed

        if more["seed"] == 2 and more["decoding"].draft_max == 0:
            request.read_step = read_step
        return write(batch, request, **more)

    monkeypatch.setattr(FlyBatch, "write", disturbed)
    proof = proof_of(tiny_target)
    way = next(way for way in proof.ways if way.name == "8 requests")
    assert "code" in way.other_logits and not proof.is_exact


def test_known_answers_are_drafted_with_a_mistake_at_every_depth():
    text = list(range(40))
    draft = KnownAnswers([[99, 98], text], 1000)
    history = np.array(text[:5], dtype=np.intc)
    drafts = [list(draft(history)) for _ in range(11)]
    wrong = [[i for i, (a, b) in enumerate(zip(one, text[5:])) if a != b] for one in drafts]
    assert wrong == [[i] for i in range(10)] + [[]]
    assert len(draft(np.array([1, 2], dtype=np.intc))) == 0
