"""The training text: documents out of a text file or out of GSM8K's JSON lines."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from recipe.errors import RecipeError

MIN_DOCUMENTS = 200
MOST_HELD_BACK = 200
PROSE_BYTES = 400_000
"""How much of the prose the tokenizer sees."""
QUESTION, ANSWER = "Question: ", "\nAnswer: "


@dataclass(frozen=True)
class Corpus:
    """Documents to train on, and those that are held back for checks and measurements."""

    training: list[str]
    held_back: list[str]
    prose: str = ""

    @property
    def prompts(self) -> list[str]:
        """First halves, cut at a space, of the first 30 documents that were held back."""
        halves = [document[: len(document) // 2].rsplit(" ", 1)[0] for document in self.held_back[:30]]
        return [half for half in halves if half]


def read_corpus(corpus: Path | None, gsm8k: Path | None, prose: Path | None) -> Corpus:
    """Reads one of `corpus` (text) and `gsm8k` (JSON lines), and the prose if any; raises RecipeError."""
    if corpus is not None:
        path, documents = corpus, split_documents(_read(corpus))
    else:
        assert gsm8k is not None
        path, documents = gsm8k, gsm8k_documents(_read(gsm8k), gsm8k)
    if len(documents) < MIN_DOCUMENTS:
        raise RecipeError(
            f"{path} holds {len(documents)} documents, but the recipe needs at least {MIN_DOCUMENTS}, separated by "
            "blank lines; give a longer text."
        )
    n_held_back = min(MOST_HELD_BACK, len(documents) // 20)
    return Corpus(documents[:-n_held_back], documents[-n_held_back:], _read(prose)[:PROSE_BYTES] if prose else "")


def split_documents(text: str) -> list[str]:
    """A blank line ends a document. In a text that begins with "Question: " only one that another question follows
    does, so that an answer may have paragraphs."""
    text = text.replace("\r\n", "\n").strip()
    following = f"(?={re.escape(QUESTION)})" if text.startswith(QUESTION) else ""
    return [document.strip() for document in re.split(rf"\n[ \t]*\n\s*{following}", text) if document.strip()]


def gsm8k_documents(lines: str, path: Path | str) -> list[str]:
    """One "Question: ...", "Answer: ..." for each row, without the <<...>> marks of the calculator."""
    documents = []
    for number, line in enumerate(lines.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            question, answer = row["question"].strip(), row["answer"].strip()
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RecipeError(
                f'{path}, line {number}: expected a JSON object with the texts "question" and "answer", as in '
                "GSM8K's train.jsonl."
            ) from None
        documents.append(f"{QUESTION}{question}{ANSWER}{re.sub('<<.*?>>', '', answer)}")
    return documents


def as_chat(document: str) -> str | None:
    """The document as a ChatML conversation; None where it is no question with its answer."""
    if not document.startswith(QUESTION) or ANSWER not in document:
        return None
    question, answer = document[len(QUESTION) :].split(ANSWER, 1)
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"cannot read {path}: {error.strerror}; give the path of a UTF-8 text file.") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 text (byte {error.start}); convert it first.") from error
