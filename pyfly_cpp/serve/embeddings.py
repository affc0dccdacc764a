"""/v1/embeddings."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pyfly_cpp.serve.completions import listed
from pyfly_cpp.serve.embedder import Embedder
from pyfly_cpp.serve.errors import bad_request
from pyfly_cpp.serve.model import Model
from pyfly_cpp.serve.settings import Settings


class Embeddings:
    """A request that was understood: its texts, and the response that is made of their vectors one by one."""

    def __init__(self, model: Model, embedder: Embedder, settings: Settings, body: Mapping[str, Any]) -> None:
        """Raises ApiError: there are too many texts, one is too long, or the vectors cannot be as they are wanted."""
        self._name = settings.name
        self._is_base64 = body.get("encoding_format") == "base64"
        self._data: list[str] = []
        if body.get("dimensions") not in (None, embedder.n_embd):
            raise bad_request(
                f"the vectors of this model have {embedder.n_embd} numbers, not fewer; leave dimensions out.",
                "dimensions",
            )
        given, most = listed(body["input"]), settings.limits.max_texts
        if len(given) > most:
            raise bad_request(f"input has {len(given)} entries; at most {most} are allowed.", "input")
        self.texts = [
            model.tokenize(one, special=False) if isinstance(one, str) else model.known(one, "input") for one in given
        ]
        """Their tokens."""
        for i, tokens in enumerate(self.texts):
            if not 0 < len(tokens) <= embedder.n_ctx:
                raise bad_request(
                    f"entry {i} of input has {len(tokens)} tokens; 1 to {embedder.n_ctx} can be embedded; split it.",
                    "input", "context_length_exceeded",
                )  # fmt: skip

    def add(self, vector: npt.NDArray[np.single]) -> None:
        """Takes the vector of the next text."""
        # Written now, not all at the end: the event loop has others to serve.
        numbers = base64.b64encode(vector.astype("<f4").tobytes()).decode() if self._is_base64 else vector.tolist()
        self._data.append(json.dumps({"object": "embedding", "index": len(self._data), "embedding": numbers}))

    def whole(self) -> bytes:
        """The response, when all vectors have been taken."""
        n = sum(map(len, self.texts))
        head = {"object": "list", "model": self._name, "usage": {"prompt_tokens": n, "total_tokens": n}}
        return f'{json.dumps(head)[:-1]}, "data": [{", ".join(self._data)}]}}'.encode()
