"""Sessions in several slots of a server: of each prompt only what is new is read, whoever asks between."""

from __future__ import annotations

import pytest
from serving import running
from ten_turns import NEAR, as_text, n_new, ten_turns

from pyfly_cpp import FlyBatch, FlyLlama

OPTIONS = {"n_ctx": 2048, "n_threads": 1, "n_threads_batch": 1, "chat_format": "chatml", "verbose": False}


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_ten_turns_among_others_read_what_is_new(kind, tiny_target, tiny_qwen35):
    """A title between the turns, and another session that begins with the same messages."""
    model = {"attention": tiny_target, "hybrid": tiny_qwen35}[kind]
    with FlyBatch(model, 3, **OPTIONS) as batch, running(batch) as server:

        def ask(messages):
            """The answer, and how many tokens were read for it."""
            body = {"messages": messages, "max_tokens": 6}
            answer = server.post("/v1/chat/completions", **body).json()
            usage = answer["usage"]
            n_read = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            return answer["choices"][0]["message"]["content"], n_read

        before = []
        for i, (happened, messages) in enumerate(ten_turns()):
            prompt = batch.tokenize(as_text(messages).encode(), add_bos=True, special=True)
            answer, n_read = ask(messages)
            n_least = n_new(prompt, before)
            assert n_least <= n_read <= n_least + (16 if kind == "attention" else NEAR), happened
            before = prompt
            ask([{"role": "user", "content": f"A title of {i} words."}])
            if i % 3 == 1:
                other = [messages[0], {"role": "user", "content": f"And pears, in basket {i}? " * 3}]
                n_read = ask(other)[1]
                n_least = n_new(batch.tokenize(as_text(other).encode(), add_bos=True, special=True), prompt)
                assert n_read <= n_least + (16 if kind == "attention" else NEAR), happened
    with FlyLlama(model, **OPTIONS) as fresh:
        found = fresh.create_chat_completion(messages, max_tokens=6, temperature=0.0)
        assert found["choices"][0]["message"]["content"] == answer
