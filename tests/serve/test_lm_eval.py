"""lm-evaluation-harness against the server. Its import alone takes seconds: -m serve_load."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.serve_load

CONTEXT, ENDINGS = "Tom has 3 apples and 4 pears. He has", (" 7 fruits.", " no fruits at all.")


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, entry, i) for i, entry in enumerate(arguments)]


def test_local_completions(server, alone):
    pytest.importorskip("tenacity")  # of lm_eval[api]
    models = pytest.importorskip("lm_eval.models.openai_completions")
    model = models.LocalCompletionsAPI(
        model="tiny", base_url=f"{server.url}/v1/completions", tokenizer_backend="remote", batch_size=2,
    )  # fmt: skip
    got = model.loglikelihood(instances("loglikelihood", [(CONTEXT, ending) for ending in ENDINGS]), disable_tqdm=True)
    n = len(alone.tokenize(CONTEXT.encode()))
    for ending, (score, _) in zip(ENDINGS, got):
        answer = alone.create_completion(CONTEXT + ending, max_tokens=1, logprobs=1, echo=True)["choices"][0]
        expected = sum(answer["logprobs"]["token_logprobs"][n:-1])
        np.testing.assert_allclose(score, expected, atol=1e-2)
    ask = instances("generate_until", [(CONTEXT, {"until": ["."], "max_gen_toks": 20, "do_sample": False})])
    expected = alone.create_completion(CONTEXT, max_tokens=20, temperature=0, stop=["."])["choices"][0]["text"]
    assert model.generate_until(ask, disable_tqdm=True) == [expected]


def test_local_chat_completions(server, alone):
    pytest.importorskip("tenacity")  # of lm_eval[api]
    models = pytest.importorskip("lm_eval.models.openai_completions")
    model = models.LocalChatCompletion(model="tiny", base_url=f"{server.url}/v1/chat/completions")
    messages = [{"role": "user", "content": CONTEXT}]
    prompt = model.apply_chat_template(messages)
    ask = instances("generate_until", [(prompt, {"until": ["\n"], "max_gen_toks": 20, "do_sample": False})])
    expected = alone.create_chat_completion(messages, max_tokens=20, temperature=0, stop=["\n"])
    assert model.generate_until(ask, disable_tqdm=True) == [expected["choices"][0]["message"]["content"]]
