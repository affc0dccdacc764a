"""The arguments, and what may be wrong with them before anything is trained. Needs no PyTorch."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from recipe.corpus import read_corpus
from recipe.errors import RecipeError
from recipe.folder import PARTS, Folder

REQUIRED = {"torch": "torch", "tokenizers": "tokenizers", "gguf": "gguf", "numpy": "numpy", "pyfly_cpp": "pyfly-cpp"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, 1 if a check failed, 2 if something is wrong with what was given."""
    args = parse(arguments)
    try:
        corpus = read_corpus(args.corpus, args.gsm8k, args.prose)
        require_packages()
        folder = Folder(args.out)
        folder.prepare(corpus, args.seed, args.only, args.force)
        from recipe.run import run  # imports PyTorch

        return 0 if run(args, corpus, folder) else 1
    except RecipeError as error:
        print(f"recipe: {error}", file=sys.stderr)
        return 2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; ends the process with status 2 on those that argparse refuses."""
    parser = argparse.ArgumentParser(
        prog="python models/recipe",
        description="Trains the tiny model family on a text of your own, exports it as GGUF, and checks the export.",
    )
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--corpus", type=Path, help="UTF-8 text; a blank line ends a document")
    text.add_argument("--gsm8k", type=Path, help="JSON lines with question and answer, such as GSM8K's train.jsonl")
    parser.add_argument("--prose", type=Path, help="UTF-8 text that the tokenizer sees besides (its first 400 kB)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--only", type=_parts, default=PARTS, help=f"parts to train, of {','.join(PARTS)}")
    parser.add_argument("--steps-scale", type=_positive, default=1.0, help="multiplies the training steps (default 1)")
    parser.add_argument("--threads", type=_threads, default=2, help="threads of the training (default 2)")
    parser.add_argument("--seed", type=_seed, default=0, help="(default 0)")
    parser.add_argument("--licence", help="what the files are to say of their licence, such as MIT")
    parser.add_argument("--force", action="store_true", help="train again what is in the folder already")
    return parser.parse_args(arguments)


def require_packages() -> None:
    """Raises RecipeError on a missing package."""
    missing = [name for module, name in REQUIRED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise RecipeError(
            f"{', '.join(missing)} not installed; run: pip install -r {Path(__file__).parent / 'requirements.txt'} "
            "pyfly-cpp"
        )


def _parts(value: str) -> tuple[str, ...]:
    chosen = value.split(",")
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a part; choose from {','.join(PARTS)}.")
    return tuple(part for part in PARTS if part in chosen)


def _positive(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {value!r}.")
    return number


def _integer(value: str, low: int) -> int:
    if not value.isdigit() or int(value) < low:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {low}, not {value!r}.")
    return int(value)


def _threads(value: str) -> int:
    return _integer(value, 1)


def _seed(value: str) -> int:
    return _integer(value, 0)
