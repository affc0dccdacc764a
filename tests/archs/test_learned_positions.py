"""Models whose positions are learned: llama.cpp ends the process at the first token behind the last one."""

from __future__ import annotations

import pytest
from described import LEARNED, N_CTX, POPULAR, make

from pyfly_cpp import ContextFullError, DraftModel, FlyBatch, FlyLlama

SETTINGS = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}


def model(name, folder):
    return str(make(name, {**POPULAR, **LEARNED}[name], folder / f"{name}.gguf"))


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("opened", [FlyLlama, FlyBatch])
def test_contexts_longer_than_learned_positions_are_refused(name, opened, tmp_path):
    """llama.cpp ends the process at the first token behind them."""
    path = model(name, tmp_path)
    with pytest.raises(ValueError, match=f"n_ctx is {N_CTX + 1}"):
        opened(path, n_ctx=N_CTX + 1, **SETTINGS)
    for n_ctx in (0, N_CTX):
        llm = opened(path, n_ctx=n_ctx, **SETTINGS)
        assert (llm.n_ctx() if opened is FlyLlama else llm.n_ctx) == N_CTX
        llm.close()


def test_a_context_that_is_rounded_up_ends_at_the_last_position(tmp_path):
    """llama.cpp's contexts are multiples of 256."""
    path = str(make("gpt2", {**LEARNED["gpt2"], "context_length": 40}, tmp_path / "gpt2.gguf"))
    prompt = list(range(1, 31))
    alone = FlyLlama(path, n_ctx=40, **SETTINGS)
    assert len(alone.create_completion(prompt, max_tokens=None, temperature=0.0)["choices"][0]["text"]) > 0
    assert alone.n_tokens <= 40
    with pytest.raises(ContextFullError):
        alone.eval(list(range(1, 31)))
    alone.close()
    with FlyBatch(path, 2, n_ctx=0, **SETTINGS) as batch:
        answer = batch.complete([prompt, prompt[:3]], max_tokens=None, temperature=0.0)[0]
        assert answer["usage"]["total_tokens"] <= 41


def test_a_draft_with_learned_positions_moves_its_window(tmp_path):
    """The text outgrows what the draft can be given."""
    draft = str(make("gpt2", {**LEARNED["gpt2"], "context_length": 40}, tmp_path / "gpt2.gguf"))
    llm = FlyLlama(
        model("llama", tmp_path), drafter=DraftModel(draft), draft_max=3, adaptive=False, n_ctx=N_CTX, **SETTINGS
    )
    tokens = [token for token, _ in zip(llm.generate(list(range(1, 31)), temp=0.0), range(60))]
    assert len(tokens) == 60
    assert llm.stats.drafted > 50
    llm.close()
