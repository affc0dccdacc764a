"""/v1/embeddings, against llama_cpp.Llama(embedding=True)."""

from __future__ import annotations

import json
import re
import threading

import llama_cpp
import numpy as np
import pytest
from gguf_edit import edit_gguf
from serving import EXACT, no_end, running
from test_manners import connected, until

from pyfly_cpp import FlyBatch
from pyfly_cpp.machine import memory
from pyfly_cpp.serve.embeddings import Embedder
from pyfly_cpp.serve.settings import RequestLimits

PATH = "/v1/embeddings"
LONG = "Natalia sold clips to 48 of her friends in April. " * 9  # more than two evaluations
TEXTS = ["Tom has 3 apples and 4 pears.", LONG, "def add(a, b):", "ä€😀"]


@pytest.fixture(scope="module")
def embedding(batch):
    with running(batch, embeddings=True, limits=RequestLimits(max_inputs=6, max_waiting=2)) as one:
        yield one


def expected(path, texts, pooling=llama_cpp.LLAMA_POOLING_TYPE_MEAN, **options):
    llm = llama_cpp.Llama(path, embedding=True, pooling_type=pooling, **{**EXACT, **options})
    out = [one["embedding"] for one in llm.create_embedding(list(texts))["data"]]
    ids = [llm.tokenize(text.encode()) for text in texts]
    llm.close()
    return np.array(out), ids


def vectors(response):
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "list" and body["model"] == "tiny"
    assert [(one["object"], one["index"]) for one in body["data"]] == [
        ("embedding", i) for i in range(len(body["data"]))
    ]
    return np.array([one["embedding"] for one in body["data"]])


def cosines(a, b):
    return (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def test_as_without_a_server(embedding, tiny_target_f32):
    wanted, ids = expected(tiny_target_f32, TEXTS)
    assert len(ids[1]) > 128
    got = embedding.post(PATH, input=TEXTS, unknown=[1], user=None)
    np.testing.assert_allclose(cosines(vectors(got), wanted), 1, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors(got), axis=1), 1, atol=1e-6)
    n = sum(map(len, ids))
    assert got.json()["usage"] == {"prompt_tokens": n, "total_tokens": n}
    for given, rows in ((ids, slice(None)), (TEXTS[1], [1]), (ids[2], [2]), (TEXTS[::-1], slice(None, None, -1))):
        np.testing.assert_allclose(vectors(embedding.post(PATH, input=given)), vectors(got)[rows], atol=1e-6)


@pytest.mark.slow
def test_a_quantised_model(smollm2):
    """Its kernels round differently in evaluations of other sizes."""
    options = {"type_k": llama_cpp.GGML_TYPE_F16, "type_v": llama_cpp.GGML_TYPE_F16}
    texts = [LONG[:400]]
    wanted, _ = expected(smollm2, texts, **options)
    with FlyBatch(smollm2, 1, **{**EXACT, **options}) as batch, running(batch, embeddings=True) as one:
        np.testing.assert_allclose(cosines(vectors(one.post(PATH, input=texts)), wanted), 1, atol=1e-4)


def test_the_openai_package(embedding, tiny_target_f32):
    wanted, _ = expected(tiny_target_f32, TEXTS)
    client = embedding.openai()
    for options in ({}, {"encoding_format": "float"}, {"dimensions": wanted.shape[1]}):  # {}: it asks for base64
        got = client.embeddings.create(model="any", input=TEXTS, user="me", **options)
        np.testing.assert_allclose(cosines(np.array([one.embedding for one in got.data]), wanted), 1, atol=1e-6)
    (model,) = client.models.list().data
    assert model.pyfly["embeddings"] == {"n_embd": wanted.shape[1], "n_ctx": 512, "pooling": "mean"}


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "input"),
        *(({"input": value}, "input") for value in (
            None, 5, [], [[]], [-1], [10**6], [[1], [10**6]], [1, "a", 10**6], [1.5],
            [True], {}, {"content": "x"}, {"content": [{"type": "image_url"}]}, "one " * 600, ["a"] * 7, [1] * 513,
        )),
        *(({"input": "a", "dimensions": value}, "dimensions") for value in (0, 1, 255, 10**6, -1, "x", 1.5)),
        *(({"input": "a", "encoding_format": value}, "encoding_format") for value in ("hex", 5, [], "")),
        ({"input": "a", "model": 5}, "model"),
        ({"input": "a", "user": []}, "user"),
    ],
)  # fmt: skip
def test_what_cannot_be(embedding, body, param):
    response = embedding.http.post(PATH, content=json.dumps(body))
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"].startswith(param), error
    assert error["message"].endswith(".") and error["message"].count(". ") == 0


def test_far_too_long(embedding):
    error = embedding.post(PATH, input="x" * 10**5)
    assert error.status_code == 400 and error.json()["error"]["code"] == "context_length_exceeded"


def test_a_server_without(server):
    counted = server.service.metrics.requests.labels(PATH, 501)._value
    before = counted.get()
    error = server.post(PATH, input="a")
    assert error.status_code == 501 and "--embeddings" in error.json()["error"]["message"]
    until(lambda: counted.get() == before + 1)  # after the answer
    before, client = counted.get(), server.openai(max_retries=2)
    with pytest.raises(pytest.importorskip("openai").APIStatusError):
        client.embeddings.create(model="tiny", input="a")
    until(lambda: counted.get() > before)
    assert counted.get() == before + 1, "the client has asked again"
    assert server.http.get("/v1/models").json()["data"][0]["pyfly"]["embeddings"] is None


def test_beside_requests_that_run(embedding, batch):
    """Neither changes the other."""
    body = {"prompt": LONG, "max_tokens": 60, "logit_bias": no_end(batch)}
    text, alone = embedding.post("/v1/completions", **body).json(), vectors(embedding.post(PATH, input=LONG))
    answers = []
    writing = [
        threading.Thread(target=lambda: answers.append(embedding.post("/v1/completions", **body).json()))
        for _ in range(3)
    ]
    for thread in writing:
        thread.start()
    n = 0
    while any(thread.is_alive() for thread in writing):
        np.testing.assert_allclose(vectors(embedding.post(PATH, input=LONG)), alone, atol=1e-6)
        n += 1
    assert n > 0
    assert [answer["choices"][0]["text"] for answer in answers] == [text["choices"][0]["text"]] * 3


def test_turns_and_clients_that_leave(embedding, monkeypatch):
    turns, go = embedding.service.embedding, threading.Event()
    evaluate = Embedder._evaluate
    monkeypatch.setattr(Embedder, "_evaluate", lambda *args: go.wait(10) and evaluate(*args))
    first = connected(embedding, {"input": [LONG] * 5}, PATH)
    until(lambda: turns.running == 1)
    second = connected(embedding, {"input": ["a"] * 4}, PATH)
    until(lambda: turns.waiting == 8)
    refused = embedding.post(PATH, input="b")
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    second.close()
    until(lambda: turns.waiting == 4)
    first.close()
    until(lambda: turns.running == turns.waiting == 0)
    go.set()
    monkeypatch.undo()

    def counted():
        return float(
            re.search(r"^pyfly_embedded_tokens_total (.*)", embedding.http.get("/metrics").text, re.MULTILINE)[1]
        )

    before = counted()
    assert embedding.post(PATH, input="b").status_code == 200
    assert counted() > before


def test_many_inputs(batch):
    """More than may wait to be written: clients send a thousand."""
    with running(batch, embeddings=True) as one:
        got = one.post(PATH, input=["a"] * 300)
        assert got.status_code == 200 and len(got.json()["data"]) == 300
        assert one.post(PATH, input=["a"] * 2049).status_code == 400


def test_a_text_that_takes_too_long(batch, monkeypatch):
    with running(batch, embeddings=True, limits=RequestLimits(max_seconds=1e-9)) as one:
        error = one.post(PATH, input=LONG)
    assert error.status_code in (400, 429), error.text  # its turn came in time, or not


@pytest.mark.parametrize("kind, word", [(2, "cls"), (3, "last"), (0, "mean")])
def test_pooling_is_the_files(tiny_target_f32, tmp_path, kind, word):
    path = str(edit_gguf(tiny_target_f32, tmp_path / "pooled.gguf", {"llama.pooling_type": kind}))
    wanted, _ = expected(path, TEXTS, kind or llama_cpp.LLAMA_POOLING_TYPE_MEAN)
    with FlyBatch(path, 1, **EXACT) as batch, running(batch, embeddings=True) as one:
        assert one.service.embedder.pooling == word
        np.testing.assert_allclose(cosines(vectors(one.post(PATH, input=TEXTS)), wanted), 1, atol=1e-6)


@pytest.mark.parametrize(
    "keys, message",
    [({"llama.pooling_type": 4}, "ranks documents"), ({"llama.attention.causal": False}, "both directions")],
)
def test_models_that_cannot(tiny_target, tmp_path, keys, message):
    path = str(edit_gguf(tiny_target, tmp_path / "other.gguf", keys))
    with FlyBatch(path, 1, **EXACT) as batch, pytest.raises(ValueError, match=message):
        Embedder(batch)


def test_too_little_memory(batch, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 10**5)
    with pytest.raises(ValueError, match=r"512 tokens need .* MB, and 0.1 MB are free; lower n_ctx, or serve without"):
        Embedder(batch)


def test_a_recurrent_model_and_an_adapter(tiny_qwen35, tiny_target_f32, lora):
    for path, options in ((tiny_qwen35, {}), (tiny_target_f32, {"lora_path": lora, "lora_scale": 0.5})):
        wanted, _ = expected(path, TEXTS, **options)
        with FlyBatch(path, 1, **EXACT, **options) as batch, running(batch, embeddings=True) as one:
            np.testing.assert_allclose(cosines(vectors(one.post(PATH, input=TEXTS)), wanted), 1, atol=1e-5)
