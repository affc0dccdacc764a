"""The parts of a target's GGUF file that the training of a head reads itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

FloatRows = npt.NDArray[np.float32]


class TargetFile:
    """Sizes, vocabulary and some weights of a GGUF file that is a whole model."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises ValueError if it lacks something, or is a part of a split model."""
        self.path = path
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._architecture = self._value("general.architecture")
        if (self._value("split.count") or 1) > 1:
            raise ValueError(
                f"{path.name} is a part of a split model, and a head is trained from a whole one; join the parts with "
                "`llama-gguf-split --merge`."
            )
        missing = {"token_embd.weight", "output_norm.weight"} - set(self._tensors)
        if missing:
            raise ValueError(
                f"{path.name} has no tensor {min(missing)!r}, which a head needs; give a whole model in one file."
            )
        self.name = str(self._value("general.name") or path.stem)
        self.n_embd = int(self._number("embedding_length"))
        self.n_head = int(self._number("attention.head_count"))
        self.head_dim = int(self._number("attention.key_length") or self.n_embd // max(self.n_head, 1))
        self.norm_eps = float(self._number("attention.layer_norm_rms_epsilon") or 1e-5)
        self.rope_base = float(self._number("rope.freq_base") or 10000.0)
        self.n_ctx = int(self._number("context_length"))
        self.n_vocab = int(self._tensors["token_embd.weight"].shape[1])

    def _value(self, key: str) -> Any:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def _number(self, key: str) -> float:
        value = self._value(f"{self._architecture}.{key}")
        return max(value) if isinstance(value, list) else value or 0

    def _rows(self, name: str, ids: npt.NDArray[np.integer[Any]]) -> FloatRows:
        tensor = self._tensors[name]
        return np.array(gguf.quants.dequantize(tensor.data[ids], tensor.tensor_type), dtype=np.float32)

    def embeddings(self, ids: npt.NDArray[np.integer[Any]]) -> FloatRows:
        """Embeddings of tokens [n]: [n, n_embd]."""
        return self._rows("token_embd.weight", ids)

    def outputs(self, ids: npt.NDArray[np.integer[Any]]) -> FloatRows:
        """Rows of the output matrix, which is the embedding if the file has none: [n, n_embd]."""
        return self._rows("output.weight" if "output.weight" in self._tensors else "token_embd.weight", ids)

    @property
    def output_norm(self) -> FloatRows:
        """Weight of the last norm, [n_embd]."""
        tensor = self._tensors["output_norm.weight"]
        return np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(-1)

    def write_vocabulary(self, writer: gguf.GGUFWriter) -> None:
        """Repeats the tokenizer."""
        for key, field in self._reader.fields.items():
            if key.startswith("tokenizer."):
                kind, *of = field.types
                writer.add_key_value(key, field.contents(), kind, sub_type=of[-1] if of else None)
