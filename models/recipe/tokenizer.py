"""The vocabulary: byte-level BPE with the three control tokens last."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from recipe.errors import RecipeError
from recipe.shapes import N_VOCAB
from recipe.vocabulary import CONTROL, Vocabulary


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of `N_VOCAB` tokens; raises RecipeError if the texts do not hold as many."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = N_VOCAB - len(CONTROL)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != size:
        raise RecipeError(
            f"the text holds only {tokenizer.get_vocab_size()} different tokens of the {size} that the vocabulary "
            "takes; give a longer text, or some prose with --prose."
        )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return tokenizer


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Tokens in the order of their ids, and the merges in the order of their ranks."""
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    return Vocabulary(tokens, [" ".join(merge) for merge in merges])
