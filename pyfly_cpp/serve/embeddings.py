"""/v1/embeddings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

from pyfly_cpp.serve.api_errors import bad_request
from pyfly_cpp.serve.contents import listed
from pyfly_cpp.serve.embedder import Embedder
from pyfly_cpp.serve.requests import EmbeddingRequest
from pyfly_cpp.serve.served_model import Model
from pyfly_cpp.serve.settings import Settings
from pyfly_cpp.serve.written import Entries


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
