"""The sampler that forbids what a grammar outside of llama.cpp does not allow."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from llama_cpp._internals import LlamaSampler

from pyfly_cpp._native import ChainMask
from pyfly_cpp.engine.drawing import draw

N = 70
ROW = np.linspace(0.0, 1.0, N, dtype=np.single)


def allow(*tokens):
    """What sets the bits of these tokens alone."""

    def fill(_, bits):
        bits[:] = 0
        for token in tokens:
            bits[token // 32] |= np.uint32(1 << token % 32)

    return fill


def chain(*more):
    sampler = LlamaSampler()
    for add in more:
        add(sampler)
    return sampler


def greedy(sampler):
    sampler.add_greedy()


@pytest.mark.parametrize("tokens", [(0,), (31, 32), (3, 64, 68), (69,)])
def test_what_is_not_allowed_is_not_chosen(tokens):
    sampler = chain(greedy)
    mask = ChainMask(sampler.sampler, N, allow(*tokens))
    assert draw(sampler.sampler, ROW) == max(tokens) and mask.take_failure() is None


def test_it_comes_before_what_truncates():
    """Else nothing would be left of the two that are most probable."""
    sampler = chain(lambda s: s.add_top_k(2), lambda s: s.add_temp(0.8), lambda s: s.add_dist(0))
    mask = ChainMask(sampler.sampler, N, allow(5, 6))
    names = [
        llama_cpp.llama_sampler_name(llama_cpp.llama_sampler_chain_get(sampler.sampler, i))
        for i in range(llama_cpp.llama_sampler_chain_n(sampler.sampler))
    ]
    assert names == [b"mask", b"top-k", b"temp", b"dist"]
    assert {draw(sampler.sampler, ROW) for _ in range(20)} == {5, 6} and mask.take_failure() is None


def test_copies_ask_about_their_own_tokens():
    asked = []

    def fill(tokens, bits):
        asked.append(tokens.tolist())
        allow(len(tokens))(tokens, bits)

    sampler = chain(greedy)
    mask = ChainMask(sampler.sampler, N, fill)
    assert draw(sampler.sampler, ROW) == 0
    copy = llama_cpp.llama_sampler_clone(sampler.sampler)
    llama_cpp.llama_sampler_accept(copy, 42)
    assert draw(copy, ROW) == 2 and draw(sampler.sampler, ROW) == 1
    llama_cpp.llama_sampler_free(copy)
    assert asked == [[], [0, 42], [0]] and mask.take_failure() is None


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_failure_is_kept_for_whoever_steps(kind):
    def fail(tokens, bits):
        raise kind("no")

    sampler = chain(greedy)
    mask = ChainMask(sampler.sampler, N, fail)
    assert draw(sampler.sampler, ROW) is None
    assert isinstance(mask.take_failure(), kind) and mask.take_failure() is None
