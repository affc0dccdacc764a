"""The folder that a run writes: tokenizer, weights of the parts (`*.pt`), GGUF files, and what they were made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from recipe.corpus import Corpus
from recipe.errors import RecipeError

PARTS = ("target", "draft", "eagle3", "qwen35", "mtp", "dflash", "dspark")
"""In the order of training; qwen35 is the trunk that mtp goes into."""
NEEDS = {"draft": "target", "eagle3": "target", "mtp": "qwen35", "dflash": "target", "dspark": "target"}
FILES = {
    "target": "tiny-llama-target-f16.gguf",
    "draft": "tiny-llama-draft-f16.gguf",
    "eagle3": "tiny-llama-eagle3-f16.gguf",
    "mtp": "tiny-qwen35-mtp-f16.gguf",
    "dflash": "tiny-llama-dflash-f16.gguf",
    "dspark": "tiny-llama-dspark-f16.gguf",
}
"""The GGUF file that a part completes. The trunk, qwen35, goes into a file together with its MTP block."""


class Folder:
    """Paths within the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokenizer = path / "tokenizer.json"
        self.origin = path / "recipe.json"
        self.sums = path / "SHA256SUMS"

    def weights(self, part: str) -> Path:
        return self.path / f"{part}.pt"

    def gguf(self, part: str) -> Path:
        return self.path / FILES[part]

    def prepare(self, corpus: Corpus, seed: int, parts: Sequence[str], force: bool) -> None:
        """Makes the folder ready for these parts to be trained; raises RecipeError where it is not fit for that."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".probe"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise RecipeError(f"cannot write to {self.path}: {error.strerror}; choose another --out.") from error
        written = [self.weights(part) for part in parts] + [self.gguf(part) for part in parts if part in FILES]
        there = [path for path in written if path.exists()]
        if there and not force:
            raise RecipeError(f"{there[0]} is there already; give --force to train it again, or choose another --out.")
        digest = _digest([*corpus.training, *corpus.held_back, corpus.prose])
        origin = json.dumps({"seed": seed, "text_sha256": digest}) + "\n"
        if self.origin.exists() and self.origin.read_text(encoding="utf-8") != origin:
            if not (force and set(parts) == set(PARTS)):
                raise RecipeError(
                    f"the parts in {self.path} were made from another text or seed; choose another --out, or train all "
                    "parts again with --force."
                )
            self.tokenizer.unlink(missing_ok=True)
        for part, base in NEEDS.items():
            if base in parts and part not in parts and self.weights(part).exists():
                raise RecipeError(
                    f"{self.weights(part)} was trained on the {base} that is to be replaced; choose another --out, or "
                    f"train it again too (--only {base},{part})."
                )
        for part in parts:
            if part in NEEDS and NEEDS[part] not in parts and not self.weights(NEEDS[part]).exists():
                raise RecipeError(
                    f"{part} is trained on {NEEDS[part]}, and {self.weights(NEEDS[part])} is not there; train it first "
                    f"(--only {NEEDS[part]},{part})."
                )
        self.origin.write_text(origin, encoding="utf-8")

    def write_sums(self) -> list[str]:
        """Writes SHA256SUMS over the GGUF files that are there; returns its lines."""
        paths = [self.gguf(part) for part in FILES if self.gguf(part).exists()]
        lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in paths]
        self.sums.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return lines


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8") + b"\0")
    return digest.hexdigest()
