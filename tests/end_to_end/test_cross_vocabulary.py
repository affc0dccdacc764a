"""A draft model of another vocabulary: histories aligned through the text, drafts as the draft model says them."""

from __future__ import annotations

import codecs
import ctypes
import functools
import itertools
import os
import random

import llama_cpp
import numpy as np
import pytest
from gguf_edit import edit_gguf, without_vocabulary
from teacher_forcing import teacher_forcing_gap
from test_several_requests import assert_greedy, complete, opened

from pyfly_cpp import CrossVocabulary, DraftModel, FlyLlama, Fuzzy, PromptLookup
from pyfly_cpp._native import Batch, ModelDrafter
from pyfly_cpp.errors import IncompatibleDraftError
from pyfly_cpp.machine.threads import physical_cores

OPTIONS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "verbose": False}
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SOURCES = (  # of random characters
    "abc ABC 123 .,:;'\"-\n\t\r", "  \n    return x_1 + y[2]  # 1e-5\n", "äöüßéñçøå ÄÖÜ", "漢字仮名交じり文 한국어",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627", "e\u0301a\u0308\u200d\ufeff\0",
    "🙂\U0001f3f3\ufe0f\u200d\U0001f308𝄞",
    "<|im_end|><s></s><unk><0x0A>▁", "Natalia sold clips to her friends. ",
)  # fmt: skip
TEXT = "Natalia sold clips to 48 of her friends — “naïve” ones, 漢字 🙂 — and then\n\n  x = [1, 22, 333]\n"


def sentence_pieces(path, to):
    """A copy with a SentencePiece vocabulary of as many tokens: bytes, letters, pieces of words, and pieces that no
    text has. It begins every text with <s> and puts a space before it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, *([6] * 256)]
    words = "▁the ▁of ▁and ▁to ▁sold ▁clips ▁friends ▁Natalia ▁her ing er lia and ▁return ▁def 漢字 ä ü ."
    steps = {word[:n] for word in words.split() for n in range(1, len(word) + 1)} | set("▁" + TEXT) - {" ", "\n"}
    steps |= {chr(c) for c in range(33, 127)} | {"▁▁", "▁▁▁▁"}
    pieces += sorted(steps, key=lambda piece: (len(piece), piece))
    kinds += [1] * (len(pieces) - len(kinds))
    pieces += [f"<unused{i}>" for i in range(1536 - len(pieces))]
    kinds += [5] * (1536 - len(kinds))
    fields = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": None, "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [float(len(piece)) for piece in pieces],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": None,
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": None,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_space_prefix": True,
    }  # fmt: skip
    return str(edit_gguf(path, to, fields))


@pytest.fixture(scope="module")
def spm(tiny_draft, tmp_path_factory):
    """`tiny_draft` with a SentencePiece vocabulary."""
    return sentence_pieces(tiny_draft, tmp_path_factory.mktemp("spm") / "spm.gguf")


@pytest.fixture(scope="module")
def draft_f32(tiny_draft, tmp_path_factory):
    """`tiny_draft` with other token ids, in F32: batches of all sizes round nearly alike."""

    def in_f32(arrays):
        arrays.update({name: array.astype(np.float32) for name, array in arrays.items()})

    return str(edit_gguf(tiny_draft, tmp_path_factory.mktemp("f32") / "f32.gguf", tensors=in_f32))


class Vocabulary:
    """Of a model file."""

    def __init__(self, path):
        self._llm = llama_cpp.Llama(path, vocab_only=True, verbose=False)
        self.n = self._llm.n_vocab()

    def tokens(self, text, special=False):
        return self._llm.tokenize(text, add_bos=False, special=special)

    def piece(self, token):
        buffer = ctypes.create_string_buffer(128)
        n = llama_cpp.llama_token_to_piece(self._llm._model.vocab, token, buffer, len(buffer), 0, False)
        return buffer.raw[:n]

    def is_control(self, token):
        attributes = llama_cpp.llama_vocab_get_attr(self._llm._model.vocab, token)
        return bool(attributes & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL)

    def bytes(self, tokens):
        return b"".join(self.piece(token) for token in tokens)

    @functools.cache  # noqa: B019 - as long as the test
    def kept(self, character):
        """What its tokens give back: SentencePiece knows no U+2581 but as a space, and SmolLM2 not every byte."""
        return self.bytes(self.tokens(f"a{character}a".encode())).lstrip()[1:-1]

    def said(self, tokens):
        """The text, up to a character that is not whole; control tokens end a character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return "".join(decoder.decode(self.piece(token), final=self.is_control(token)) for token in tokens)


def cross(target, path, p_min=0.0, **settings):
    return ModelDrafter("cross-vocabulary", "cross", target, path, p_min, **settings)


def random_text(rng):
    source = rng.choice([*SOURCES, "".join(SOURCES)])
    return "".join(rng.choice(source) for _ in range(rng.randrange(30))).encode()


def random_history(rng, vocabulary):
    """Of a random text: tokenised whole, or in parts that cut characters and words; or tokens of any kind."""
    text, how = random_text(rng), rng.randrange(4)
    if how == 0:
        return vocabulary.tokens(text)
    if how == 1:  # a part that begins within a character is no valid text, and comes back as something else
        at = rng.randrange(len(text) + 1)
        return vocabulary.tokens(text[:at]) + vocabulary.tokens(text[at:])
    if how == 2:
        return [vocabulary.tokens(bytes([byte]))[-1] for byte in text if byte < 128]
    return [rng.randrange(vocabulary.n) for _ in range(rng.randrange(12))]


# ---- Histories -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", ["spm drafts for bpe", "bpe drafts for spm", "smollm2 drafts for bpe"])
def test_random_texts_stay_aligned(pair, tiny_target, tiny_draft, spm, request):
    """Texts that grow and are taken back: the draft's tokens give back the text, up to a character that is not whole.
    What is no UTF-8 is U+FFFD there. PYFLY_FUZZ_CASES says how many; tests/core has 10,000 of made-up vocabularies."""
    draft = {"spm": lambda: spm, "bpe": lambda: tiny_draft, "smo": lambda: request.getfixturevalue("smollm2")}[pair[:3]]
    paths = (spm if pair.endswith("spm") else tiny_target, draft())
    own, other = map(Vocabulary, paths)
    rng = random.Random(pair)
    with opened(paths[0], n_requests=1) as target, cross(target, paths[1], use_extra_bufts=0) as drafter:
        for _ in range(int(os.environ.get("PYFLY_FUZZ_CASES", 300))):
            history = random_history(rng, own)
            for n in (len(history), rng.randrange(len(history) + 1), len(history)):
                seen = drafter.translate(history[:n])
                text = own.said(history[:n])
                assert other.bytes(seen) == b"".join(map(other.kept, text)), history[:n]
                history = history[:n] + history[n + 1 :]
    assert set(map(own.is_control, range(own.n))) == {False, True}


def test_the_draft_sees_what_it_would_make_of_the_text_itself(tiny_target, smollm2):
    """As tokenised at once, whether the text came at once or token by token."""
    own, other = Vocabulary(tiny_target), Vocabulary(smollm2)
    with opened(tiny_target, n_requests=1) as target, cross(target, smollm2, use_extra_bufts=0) as drafter:
        history = own.tokens((TEXT * 40).encode())
        assert len(history) > 2048
        assert drafter.translate(history) == other.tokens((TEXT * 40).encode())
        history = own.tokens((TEXT + TEXT).encode())
        for n in range(len(history) + 1):
            seen = drafter.translate(history[:n])
        assert seen == other.tokens((TEXT + TEXT).encode())


def test_control_tokens_stand_for_each_other(tiny_target, spm, smollm2):
    names = Vocabulary(tiny_target)
    end_of_turn, begin = names.tokens(b"<|im_end|>", special=True), names.tokens(b"<|im_start|>", special=True)
    if len(end_of_turn) > 1:
        pytest.skip("the tiny models have other markers")
    history = [*begin, *names.tokens(b"user"), *end_of_turn]
    with opened(tiny_target, n_requests=1) as target:
        with cross(target, smollm2, use_extra_bufts=0) as drafter:
            assert drafter.translate(history) == Vocabulary(smollm2).tokens(b"<|im_start|>user<|im_end|>", True)
        with cross(target, spm) as drafter:  # </s> ends what it says, and it knows no beginning but that of the text
            seen = drafter.translate(history)
            assert (seen[0], seen[-1]) == (1, 2) and Vocabulary(spm).bytes(seen) == b"user"


# ---- Drafts ----------------------------------------------------------------------------------------------------------


def greedy(llm, tokens, n):
    stream = llm.generate(tokens, temp=0.0)
    out = list(itertools.islice(stream, n))
    stream.close()
    return out


def test_a_draft_is_what_the_draft_model_says(spm, draft_f32):
    """In tokens of the target: those of SentencePiece here, of byte-level BPE there."""
    own, other = Vocabulary(spm), Vocabulary(draft_f32)
    llm = llama_cpp.Llama(draft_f32, **OPTIONS)
    n_proposed = 0
    with opened(spm, n_requests=1, n_ctx=512) as target, cross(target, draft_f32) as drafter:
        for n, k in zip(range(5, 60, 3), itertools.cycle([1, 3, 8])):
            history = own.tokens((TEXT + "She sold clips to her friends and then to ").encode())[: n + 20]
            seen = drafter.translate(history)
            proposal = drafter.propose(history, k)
            assert len(proposal) <= k
            tail = len(own.bytes(history)) - len(other.bytes(seen))
            ahead = other.bytes(greedy(llm, seen, 4 * k + 8))[tail:]
            assert ahead.startswith(own.bytes(t for t in proposal if not own.is_control(t)))
            n_proposed += len(proposal)
    assert n_proposed > 60
    llm.close()


def test_the_cache_of_the_draft_is_kept(tiny_target, spm):
    """In a step it evaluates about what it drafts, not the text."""
    fly = FlyLlama(tiny_target, drafter=CrossVocabulary(DraftModel(spm, draft_max=4)), **OPTIONS)
    prompt = fly.tokenize((TEXT * 3).encode())
    greedy(fly, prompt, 1)
    (drafter,) = fly.loaded.decoder.drafters
    before, steps = drafter.n_evaluated, fly.stats.rounds
    greedy(fly, prompt, 20)
    steps = fly.stats.rounds - steps
    # Four tokens of the target are up to 16 of the draft, two more are drafted, and a few at the end change.
    assert steps > 5 and drafter.n_evaluated - before < 25 * steps
    fly.close()


@pytest.mark.parametrize("settings", [{"draft_max": 4}, {"adaptive": True}], ids=str)
def test_lossless_on_tiny_models(settings, tiny_target, tiny_draft, spm):
    """The draft says nothing of use to the other vocabulary, or (with its own) what is often right."""
    for path, least in ((spm, -1), (tiny_draft, 30)):
        fly = FlyLlama(tiny_target, drafter=CrossVocabulary(DraftModel(path)), **settings, **OPTIONS)
        prompt = fly.tokenize((TEXT + "In April she sold 24 clips, and in May she sold").encode())
        tokens = greedy(fly, prompt, 100)
        assert teacher_forcing_gap(tiny_target, [*prompt, *tokens], len(prompt)).max() < 0.03
        if "draft_max" in settings:
            assert fly.stats.drafted > 50 and fly.stats.matched > least
        fly.close()


def test_several_requests_at_once(tiny_target, tiny_draft):
    prompts = [[5 + i % n for i in range(30)] for n in (7, 11, 40, 3)]
    with opened(tiny_target) as target, Batch(target) as batch, cross(target, tiny_draft) as drafter:
        batch.configure([(drafter, 4)])
        answers = complete(batch, prompts, [40] * 4)
        assert sum(counters["matched"] for _, counters in answers) > 10
        batch.configure([(drafter, 4)], adaptive=True)
        costs = batch.measure()
        assert costs.drafts
        batch.expect(costs)
        answers += complete(batch, prompts, [40] * 4)
        batch.configure([])
    assert_greedy(tiny_target, [*prompts, *prompts], answers)


@pytest.mark.model_1b5
def test_lossless_on_a_model_of_1b5(model_1b5, smollm2, record_property):
    """SmolLM2 drafts for Qwen2.5-Coder; rows of K-quants in batches and alone differ by up to 1.2 logits."""
    threads = {"n_threads": physical_cores(), "n_threads_batch": physical_cores()}
    fly = FlyLlama(
        model_1b5, n_ctx=1024, verbose=False, drafter=CrossVocabulary(DraftModel(smollm2, draft_max=5)), **threads
    )
    for question in ("Write a haiku about the sea in German, and then in Japanese.", "Sort a list in Python."):
        prompt = fly.tokenize(CHAT.format(question).encode(), special=True)
        fly.reset_stats()
        tokens = greedy(fly, prompt, 120)
        found = teacher_forcing_gap(model_1b5, [*prompt, *tokens], len(prompt), n_threads=threads["n_threads"])
        record_property("largest_gap", float(found.max()))
        assert found.max() < 2.4 and fly.stats.matched > 10
    fly.close()


# ---- What cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [PromptLookup(), None, "draft.gguf", CrossVocabulary(DraftModel("x"))], ids=str)
def test_what_it_takes(inner):
    with pytest.raises(ValueError, match="takes a DraftModel"):
        CrossVocabulary(inner)


def test_the_remedy_is_named(tiny_target, spm):
    with pytest.raises(IncompatibleDraftError, match=r"same model family, or CrossVocabulary\(DraftModel\(...\)\)"):
        FlyLlama(tiny_target, drafter=DraftModel(spm), **OPTIONS)


def test_files_that_are_no_drafts(tiny_target, tmp_path):
    (tmp_path / "text.gguf").write_text("not a model")
    for path in ("nowhere.gguf", str(tmp_path / "text.gguf")):
        with pytest.raises(ValueError, match="draft model"):
            FlyLlama(tiny_target, drafter=CrossVocabulary(DraftModel(path)), **OPTIONS)


def test_vocabularies_without_texts(tiny_target, tiny_draft, tmp_path):
    bare = str(edit_gguf(tiny_draft, tmp_path / "bare.gguf", without_vocabulary(tiny_draft)))
    with pytest.raises(IncompatibleDraftError, match="the draft model has no text for its tokens"):
        FlyLlama(tiny_target, drafter=CrossVocabulary(DraftModel(bare)), **OPTIONS)
    with pytest.raises(IncompatibleDraftError, match="the target has no text for its tokens"):
        FlyLlama(bare, drafter=CrossVocabulary(DraftModel(tiny_draft)), **OPTIONS)


def test_rules_that_need_rows(tiny_target, spm):
    drafter, gate = CrossVocabulary(DraftModel(spm)), Fuzzy("js", 0.1)
    with pytest.raises(ValueError, match="of another vocabulary has none; use a draft model or a head"):
        FlyLlama(tiny_target, drafter=drafter, gate=gate, **OPTIONS)
    fly = FlyLlama(tiny_target, drafter=drafter, **OPTIONS)
    fly.gate = gate
    with pytest.raises(ValueError, match="this drafter has none; use a draft model or a head"):
        greedy(fly, [5, 6, 7], 3)
    fly.close()


def test_only_it_translates(tiny_target, tiny_draft):
    with (
        opened(tiny_target, n_requests=1) as target,
        ModelDrafter("draft model", "model", target, tiny_draft, 0.0) as drafter,
        pytest.raises(ValueError, match="no vocabulary of its own"),
    ):
        drafter.translate([1, 2])
