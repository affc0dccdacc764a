"""Embeddings: the context that makes vectors while answers are written, and the route that asks for them."""

from __future__ import annotations

import asyncio
import base64
import functools
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pyfly_cpp import _native
from pyfly_cpp.engine.loaded_model import LoadedModel
from pyfly_cpp.errors import ArgumentError, NativeError, NotFiniteError
from pyfly_cpp.llama.fly_batch import FlyBatch
from pyfly_cpp.machine import memory
from pyfly_cpp.serve.api_errors import bad_request
from pyfly_cpp.serve.requests import EmbeddingRequest, listed
from pyfly_cpp.serve.served_model import Model
from pyfly_cpp.serve.settings import Settings
from pyfly_cpp.serve.streams import Entries

_CHUNK = 64
"""Tokens of one evaluation; answers that are being written wait for it. llama.cpp makes a row of logits for each."""

_POOLINGS = {
    llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED: "mean",
    llama_cpp.LLAMA_POOLING_TYPE_NONE: "mean",
    llama_cpp.LLAMA_POOLING_TYPE_MEAN: "mean",
    llama_cpp.LLAMA_POOLING_TYPE_CLS: "cls",
    llama_cpp.LLAMA_POOLING_TYPE_LAST: "last",
}


class Embedder:
    """Makes a vector of a text: the hidden states of its tokens behind the last layer, pooled.

    A text is evaluated in pieces, in the thread that steps the batch and between its steps. llama.cpp would pool each
    piece by itself, so the rows are pooled here.
    """

    def __init__(self, batch: FlyBatch, pooling: str | None = None) -> None:
        """Makes the context, which takes memory for one request of the batch. It is freed with the batch's model.

        Args:
            pooling: mean, cls, last or none; None: the choice of the model's file.

        Raises:
            ValueError: the model makes no embeddings, or there is too little memory.
        """
        model = batch.model
        self._batch = batch
        own = _pooling(model.metadata)
        self.pooling = own if pooling is None else pooling
        """mean, cls, last or none; by default the choice of the model's file, or mean."""
        self.n_ctx = batch.n_ctx
        """Most tokens of a text."""
        self.n_embd = int(llama_cpp.llama_model_n_embd_out(model.native))
        """Numbers of a vector."""
        self._context = self._make_context(model)
        model.on_close(llama_cpp.llama_free, self._context)
        if not model.apply_lora(self._context):
            raise ValueError(f"the LoRA adapter {model.lora_path!r} does not fit embeddings; leave it out.")

    def _make_context(self, model: LoadedModel) -> Any:
        params = type(model.context_params).from_buffer_copy(model.context_params)
        params.embeddings, params.pooling_type = True, llama_cpp.LLAMA_POOLING_TYPE_NONE
        params.n_ctx, params.n_batch, params.n_ubatch = self.n_ctx, _CHUNK, _CHUNK
        params.n_seq_max, params.n_rs_seq, params.n_outputs_max = 1, 0, 0
        params.cb_eval = type(params.cb_eval)()  # what the other context calls is for that one
        remedy = "lower {n_ctx}, or serve without embeddings"
        n_needed = memory.simulated_context(model.path, model.model_params, params, 1, self.n_ctx) or 0
        n_free = memory.available()
        if n_free is not None and n_needed > n_free:
            raise ArgumentError(
                f"embeddings of {self.n_ctx} tokens need {memory.in_words(n_needed)}, and "
                f"{memory.in_words(n_free)} are free; {remedy}."
            )
        with _native.load_guard():
            context = llama_cpp.llama_init_from_model(model.native, params)
        if not context:
            raise ArgumentError(f"llama.cpp could not make a context for embeddings of {model.path!r}; {remedy}.")
        return context

    async def embed(self, tokens: Sequence[int], max_seconds: float) -> npt.NDArray[np.single]:
        """The vector, float32 [n_embd]; with pooling none the rows as they are, float32 [n_tokens, n_embd]. For one
        task at a time; one that is cancelled holds up the next for a piece.

        Args:
            tokens: 1..n_ctx ids of the vocabulary.
            max_seconds: Checked between the pieces.

        Raises:
            ApiError: it takes longer.
            NotFiniteError, NativeError: the model gives no numbers; llama.cpp fails.
            ValueError: the batch is closed.
        """
        deadline = time.monotonic() + max_seconds
        pieces = []
        for i in range(0, len(tokens), _CHUNK):
            if time.monotonic() > deadline:
                raise bad_request(f"an input takes more than {max_seconds:g} seconds; split it.", "input")
            evaluation = functools.partial(self._evaluate, tokens[i : i + _CHUNK], i == 0)
            pieces.append(await asyncio.wrap_future(self._batch.between_steps(evaluation)))
        if self.pooling == "none":
            return np.concatenate(pieces).astype(np.single)
        vector = np.sum(pieces, axis=0) if self.pooling == "mean" else pieces[0 if self.pooling == "cls" else -1]
        length = float(np.linalg.norm(vector))
        if not np.isfinite(length):
            raise NotFiniteError("an embedding is not finite; the model's file may be damaged.")
        return (vector / (length or 1.0)).astype(np.single)

    def _evaluate(self, tokens: Sequence[int], is_first: bool) -> npt.NDArray[np.double]:
        """The rows of the next tokens of a text, pooled. In the stepping thread."""
        if is_first:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        ids = (llama_cpp.llama_token * len(tokens))(*tokens)
        code = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(ids, len(ids)))
        if code != 0:
            raise NativeError(f"llama.cpp could not evaluate an input for its embedding (code {code}).")
        rows = np.ctypeslib.as_array(llama_cpp.llama_get_embeddings(self._context), (len(ids), self.n_embd))
        if self.pooling == "none":
            return np.array(rows, dtype=np.double)
        chosen = {"mean": rows, "cls": rows[:1], "last": rows[-1:]}[self.pooling]
        return np.asarray(chosen.sum(axis=0, dtype=np.double))


def _pooling(metadata: dict[str, str]) -> str:
    """Raises ValueError: the model makes no vectors of texts that begin before they end."""
    architecture = metadata.get("general.architecture", "")
    kind = int(metadata.get(f"{architecture}.pooling_type", llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED))
    if kind not in _POOLINGS:
        raise ValueError("this model ranks documents and makes no embeddings; serve it without embeddings.")
    if metadata.get(f"{architecture}.attention.causal") == "false" or architecture == "gemma-embedding":
        raise ValueError(
            "this model reads in both directions, which embeddings here cannot; use llama-cpp-python's own server."
        )
    return _POOLINGS[kind]


class Embeddings:
    """A request that was understood: its texts, and the response that is made of their vectors one by one."""

    def __init__(
        self, model: Model, embedder: Embedder, settings: Settings, body: EmbeddingRequest, is_native: bool
    ) -> None:
        """`is_native`: whether the response is that of llama.cpp's /embeddings: a list, each vector a list of rows.

        Raises:
            ApiError: there are too many texts, one is too long, or the vectors cannot be as they are wanted.
        """
        self._name = settings.name
        self._is_native = is_native
        if embedder.pooling == "none" and not is_native:
            raise bad_request("this server does not pool, which the protocol has no word for; ask at /embeddings.")
        self._is_base64 = body.encoding_format == "base64"
        self._data, self._n = Entries(), 0
        if body.dimensions not in (None, embedder.n_embd):
            raise bad_request(
                f"the vectors of this model have {embedder.n_embd} numbers, not fewer; leave dimensions out.",
                "dimensions",
            )
        given, most = listed(body.input), settings.limits.max_inputs
        if len(given) > most:
            raise bad_request(f"input has {len(given)} entries; at most {most} are allowed.", "input")
        self.texts = [model.read(one, "input", special=False) for one in given]
        """Their tokens."""
        for i, tokens in enumerate(self.texts):
            if not 0 < len(tokens) <= embedder.n_ctx:
                raise bad_request(
                    f"entry {i} of input has {len(tokens)} tokens, which is too large; up to {embedder.n_ctx} can be "
                    "embedded; split it.",
                    "input", "context_length_exceeded",
                )  # fmt: skip

    def add(self, vector: npt.NDArray[np.single]) -> None:
        """Takes the vector of the next text."""
        one: dict[str, Any] = {"index": self._n}
        self._n += 1
        if self._is_native:
            one["embedding"] = rows = Entries()
            for row in np.atleast_2d(vector):  # one by one: each may have thousands of numbers
                rows.extend([row.tolist()])
        elif self._is_base64:
            one.update(object="embedding", embedding=base64.b64encode(vector.astype("<f4").tobytes()).decode())
        else:
            one.update(object="embedding", embedding=vector.tolist())
        self._data.extend([one])

    def whole(self) -> Any:
        """The response, when all vectors have been taken."""
        if self._is_native:
            return self._data
        n = sum(map(len, self.texts))
        usage = {"prompt_tokens": n, "total_tokens": n}
        return {"object": "list", "model": self._name, "usage": usage, "data": self._data}
