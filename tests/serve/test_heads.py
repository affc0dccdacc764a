"""A server with one slot, whose drafter reads the target's hidden states: chats that begin alike, in turn."""

from __future__ import annotations

import json

from heads import EAGLE3, LLAMA, TESTS
from serving import running

from pyfly_cpp import Eagle3, FlyBatch


def test_chats_that_share_a_beginning_are_answered():
    lines = (TESTS / "data" / "half_documents.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[:8]]
    long = "\n".join(texts)[:1200]
    settings = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    drafter = Eagle3(EAGLE3, draft_max=4)
    with FlyBatch(LLAMA, 1, drafter=drafter, adaptive=False, **settings) as batch, running(batch) as server:
        for content in (long, long[:300] + texts[7], "Hi", long, "Hi", texts[0]):
            response = server.post(
                "/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=24
            )
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["completion_tokens"] > 0
        assert batch.stats.drafted > 0
