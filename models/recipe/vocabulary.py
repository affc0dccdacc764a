"""What a GGUF file says of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from recipe.shapes import N_VOCAB

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDOFTEXT, IM_START, IM_END = range(N_VOCAB - len(CONTROL), N_VOCAB)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in the order of their ids, and merges ("left right") in the order of their ranks."""

    tokens: list[str]
    merges: list[str]
