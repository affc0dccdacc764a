"""What goes wrong is said in a sentence that names the thing and the remedy, and the object goes on."""

from __future__ import annotations

import gc
import inspect
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf_edit import edit_gguf, other_token, with_nan, with_padding, without_vocabulary
from heads import EAGLE3, PROMPT, SHORT, answer, error_in_subprocess, right_answers
from llama_cpp import LlamaGrammar, LogitsProcessorList, StoppingCriteriaList

import pyfly_cpp
from pyfly_cpp import (
    BusyError,
    ContextFullError,
    DraftModel,
    Entropy,
    FlyBatch,
    FlyLlama,
    Margin,
    PromptLookup,
    Stochastic,
    Window,
)
from pyfly_cpp.decoding.presets import load_preset
from pyfly_cpp.errors import IncompatibleDraftError, NativeError, NotFiniteError
from pyfly_cpp.llama import fly_llama
from pyfly_cpp.machine.releases import CACHE_TYPES

OPTIONS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.fixture(scope="module")
def expected(tiny_target):
    return right_answers(tiny_target, OPTIONS)


@pytest.fixture(params=[pytest.param("lookup", marks=pytest.mark.slow), "draft"])
def fly(request, tiny_target, tiny_draft, expected):
    """A FlyLlama that must give the right answers at the end of the test."""
    drafter = PromptLookup() if request.param == "lookup" else DraftModel(tiny_draft, draft_max=5)
    llm = FlyLlama(tiny_target, drafter=drafter, adaptive=False, **OPTIONS)
    yield llm
    for prompt in (PROMPT, SHORT, PROMPT):
        assert answer(llm, prompt) == expected[prompt]
    llm.close()


# ---- Files -----------------------------------------------------------------------------------------------------------


def bad_files(tmp_path, good):
    data = Path(good).read_bytes()
    contents = {
        "truncated in its tensors": data[:1_000_000],
        "truncated in its header": data[:5000],
        "magic only": data[:4],
        "not a gguf": b"PK\x03\x04" + data[4:4000],
        "empty": b"",
    }
    for name, content in contents.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        yield name, str(path)
    yield "missing", str(tmp_path / "missing.gguf")
    yield "folder", str(tmp_path)


MESSAGES = {
    "truncated in its tensors": "truncated",
    "truncated in its header": "truncated",
    "magic only": "truncated",
    "not a gguf": "is not a GGUF file.*download",
    "empty": "is not a GGUF file.*download",
    "missing": "there is no .* file .*check the path",
    "folder": r"is a folder.*\.gguf",
}


def test_model_file(tmp_path, tiny_draft):
    for name, path in bad_files(tmp_path, tiny_draft):
        with pytest.raises(ValueError, match=MESSAGES[name]) as caught:
            FlyLlama(path, **OPTIONS)
        assert repr(path) in str(caught.value), name


def test_an_adapter_that_is_none(tmp_path, tiny_target, tiny_draft, lora, monkeypatch):
    """llama-cpp-python takes a null pointer for an adapter, and the process ended at the first completion."""
    opened, closed, native = [], [], llama_cpp.llama_cpp
    load, free = native.llama_model_load_from_file, native.llama_model_free
    monkeypatch.setattr(native, "llama_model_load_from_file", lambda *args: opened.append(load(*args)) or opened[-1])
    monkeypatch.setattr(native, "llama_model_free", lambda model: closed.append(model) or free(model))
    for model, adapter in ((tiny_target, tiny_draft), (tiny_draft, lora), (tiny_target, str(tmp_path / "none.gguf"))):
        for load_one in (FlyLlama, FlyBatch):
            with pytest.raises(ValueError, match=r"cannot be used as a LoRA adapter") as caught:
                load_one(model, lora_path=adapter, **OPTIONS)
            assert repr(adapter) in str(caught.value) and opened and closed == opened


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_place_of_a_file(tmp_path):
    """Reading it would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    for load in (FlyLlama, load_preset):
        with pytest.raises(ValueError, match="is a device or a pipe; give the path of a"):
            load(str(tmp_path / "pipe"))


def test_draft_file(tmp_path, tiny_draft, fly):
    drafter = fly.drafter
    for name, path in bad_files(tmp_path, tiny_draft):
        with pytest.raises(
            (ValueError, NativeError), match=MESSAGES[name].replace("truncated", "complete GGUF")
        ) as caught:
            fly.drafter = DraftModel(path)
        assert path in str(caught.value), name
        assert fly.drafter is drafter


def test_a_path_object(tiny_target, expected, tmp_path):
    llm = FlyLlama(Path(tiny_target), drafter=DraftModel(Path(tiny_target)), adaptive=False, **OPTIONS)
    assert answer(llm) == expected[PROMPT]


def test_models_without_a_vocabulary(tiny_target, tiny_draft, tiny_qwen35, tmp_path):
    """They generate by token ids, and what drafts for them needs as many tokens."""
    target, draft, hybrid, head = (
        edit_gguf(path, tmp_path / Path(path).name, without_vocabulary(path))
        for path in (tiny_target, tiny_draft, tiny_qwen35, EAGLE3)
    )
    smaller = edit_gguf(
        draft, tmp_path / "smaller.gguf", {"llama.vocab_size": 1500}, _first_rows("token_embd.weight", 1500)
    )
    code = """
        import itertools, llama_cpp
        target, draft, hybrid, head, smaller, other = map(str, paths)
        settings["n_batch"] = 64
        expected = list(itertools.islice(llama_cpp.Llama(target, **settings).generate([5, 6, 7], temp=0.0), 40))
        for drafter in (None, PromptLookup(), DraftModel(draft), DraftModel(hybrid), Eagle3(head)):
            llm = FlyLlama(target, drafter=drafter, adaptive=False, **settings)
            assert list(itertools.islice(llm.generate([5, 6, 7], temp=0.0), 40)) == expected
            assert not drafter or llm.stats.matched
        for call in (lambda: llm.tokenize(b"x"), lambda: llm.detokenize([5]), lambda: llm("x"), lambda: llm([5, 6])):
            try:
                call()
            except ValueError as error:
                assert "no vocabulary: give generate() token ids" in str(error), error
            else:
                assert False
        for wrong, why in ((smaller, "vocabulary size is 1500, the target's 1536"), (other, "tokenizer type is")):
            try:
                llm.drafter = DraftModel(wrong)
            except IncompatibleDraftError as error:
                assert why in str(error), error
            else:
                assert False"""
    paths = (target, draft, hybrid, head, smaller, tiny_draft)
    assert error_in_subprocess(textwrap.dedent(code), *paths) == "no error"


def _first_rows(name, n):
    def edit(arrays):
        arrays[name] = arrays[name][:n]

    return edit


# ---- Drafts that do not fit ------------------------------------------------------------------------------------------


def test_a_draft_of_another_vocabulary(tiny_target, tiny_draft, fly, tmp_path):
    texts = str(edit_gguf(tiny_draft, tmp_path / "texts.gguf", other_token(tiny_draft, "pyfly", "cpp")))
    with pytest.raises(
        IncompatibleDraftError, match=r"vocabulary.*token 700 is .* and 'pyfly' in the draft.*same"
    ) as e:
        fly.drafter = DraftModel(texts)
    assert texts in str(e.value)
    for name, token in (("eos", 1533), ("bos", 1532)):
        fields = {f"tokenizer.ggml.{name}_token_id": token, f"tokenizer.ggml.add_{name}_token": True}
        other = edit_gguf(tiny_draft, tmp_path / f"{name}.gguf", fields)
        with pytest.raises(IncompatibleDraftError, match=rf"{name.upper()} token is {token}, the target's"):
            fly.drafter = DraftModel(other)
    longer = edit_gguf(tiny_draft, tmp_path / "longer.gguf", *with_padding(tiny_draft, 129))
    with pytest.raises(IncompatibleDraftError, match="vocabulary size is 1665, the target's 1536"):
        fly.drafter = DraftModel(longer)
    with pytest.raises(ValueError):  # what callers of a constructor look for
        FlyLlama(tiny_target, drafter=DraftModel(texts), adaptive=False, **OPTIONS)


# ---- Contexts that are full ------------------------------------------------------------------------------------------


def test_bytes_are_no_prompt(fly):
    for prompt in (b"Hello", bytearray(b"Hello")):
        for suffix in (None, "x"):
            with pytest.raises(ValueError, match="a prompt is a string or a list of token ids, not "):
                fly(prompt, suffix=suffix)


def test_a_token_that_is_none_has_no_text(fly, tiny_target):
    with FlyBatch(tiny_target, 1, **OPTIONS) as batch:
        for llm in (fly, batch):
            for token in (-1, fly.n_vocab(), 2**40):
                for special in (False, True):
                    with pytest.raises(ValueError, match=rf"token {token} is outside the vocabulary of"):
                        llm.detokenize([token], special=special)


def test_sampling_where_there_is_no_row(fly, tiny_target):
    """llama.cpp ended the process, or a row of a draft was read."""
    tokens = fly.tokenize(PROMPT.encode())
    fly.eval(tokens)
    token = fly.sample(temp=0.0)
    fly.load_state(fly.save_state())
    generator = fly.generate(tokens, temp=0.0)
    assert next(generator) == token
    with pytest.raises(ValueError, match="needs logits that the context does not hold"):
        fly.sample(temp=0.0)
    generator.close()
    drafter, fly.drafter = fly.drafter, None
    with pytest.raises(ValueError, match="needs logits"):
        fly.sample(temp=0.0)
    fly.drafter = drafter
    with FlyLlama(tiny_target, **OPTIONS) as plain:
        plain.eval(tokens)
        state = plain.save_state()
        generator = plain.generate(tokens, temp=0.0)
        for _ in range(5):
            assert next(generator) == plain.sample(temp=0.0)
    with FlyLlama(tiny_target, **OPTIONS) as plain:
        plain.load_state(state)
        with pytest.raises(ValueError, match=r"a saved state has none\); eval\(\) tokens first"):
            plain.sample(temp=0.0)
        plain.eval(tokens[:3])
        plain.sample(temp=0.0)
        with pytest.raises(ValueError, match="needs logits"):
            plain.sample(temp=0.0, idx=0)
        plain.load_state(state)
        with pytest.raises(ValueError, match="a saved state has none"):
            plain.sample(temp=0.0)


def test_a_vocabulary_computes_nothing(tiny_target):
    for embedding in (False, True):
        with FlyLlama(tiny_target, vocab_only=True, embedding=embedding, **OPTIONS) as llm:
            for use in (lambda: llm.eval([1, 2]), *([lambda: llm.embed("x")] if embedding else [])):
                with pytest.raises(ValueError, match="vocab_only=True and computes nothing; load it without"):
                    use()


def test_a_prompt_longer_than_the_context(fly):
    tokens = [300] * 300
    with pytest.raises(ValueError, match=r"300.*256"):
        fly(tokens, max_tokens=5)
    with pytest.raises(ContextFullError, match=r"prompt has 300 tokens.*context holds 256.*raise n_ctx"):
        next(fly.generate(tokens))


def test_a_context_that_fills_in_mid_answer(fly, tiny_target):
    base = llama_cpp.Llama(tiny_target, **OPTIONS)
    tokens = fly.tokenize(PROMPT.encode())
    tokens = (tokens * 20)[:240]
    bias = {fly.token_eos(): -100.0, fly.token_bos(): -100.0}
    found = fly(tokens, max_tokens=None, temperature=0, logit_bias=bias)
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 16
    assert found["choices"] == base(tokens, max_tokens=None, temperature=0, logit_bias=bias)["choices"]


def test_generating_to_the_end_of_the_context(fly, tiny_target):
    base = llama_cpp.Llama(tiny_target, **{**OPTIONS, "n_ctx": 512})
    tokens = (fly.tokenize(PROMPT.encode()) * 20)[:240]
    plain = base.generate(tokens, temp=0.0)
    found = []
    with pytest.raises(ContextFullError, match="context of 256 tokens is full; raise n_ctx"):
        for token in fly.generate(tokens, temp=0.0):
            found.append(token)
    # 16 fill the context; one more can be predicted from it.
    assert len(found) in (16, 17)
    assert found == [next(plain) for _ in found]
    assert fly.n_tokens <= 256


def test_an_empty_prompt(fly):
    with pytest.raises(ValueError, match="prompt is empty"):
        next(fly.generate([]))


@pytest.mark.parametrize("token", [-1, 1536, 2**31, 2**40])
def test_a_prompt_token_outside_the_vocabulary(fly, token):
    with pytest.raises(ValueError, match=r"outside the vocabulary of 1536|32-bit integer"):
        next(fly.generate([5, token, 6]))


# ---- Arguments -------------------------------------------------------------------------------------------------------


def test_more_drafts_than_a_batch_holds(tiny_target, tiny_draft, fly, expected):
    for k in (256, 1000):
        with pytest.raises(ValueError, match=rf"draft_max is {k}.*256 tokens \(n_batch\).*lower draft_max or raise"):
            fly.draft_max = k
    with pytest.raises(ValueError, match=r"draft_max is 64.*32 tokens \(n_batch\)"):
        FlyLlama(tiny_target, draft_max=64, n_batch=32, **OPTIONS)
    for k in (-1, 1.5, "4", True, math.nan):
        with pytest.raises(ValueError, match="draft_max must be an integer >= 0 or None"):
            fly.draft_max = k
    small = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, draft_max=200), n_batch=16, **OPTIONS)
    assert small.draft_max <= 15 and answer(small) == expected[PROMPT]  # a drafter's own wish is cut, not refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Entropy(-0.1), r"theta must be a finite number >= 0, not -0.1"),
        (lambda: Entropy(math.nan), "theta.*nan"),
        (lambda: Entropy(math.inf), "theta.*inf"),
        (lambda: Entropy("0.3"), "theta must be a number, not '0.3'"),
        (lambda: Entropy(1.2, top=None), r"theta must be in \[0, 1\], not 1.2"),
        (lambda: Entropy(0.3, top=0), r"top must be an integer in 1..32.*None"),
        (lambda: Margin(-1), "tau must be a finite number >= 0, not -1"),
        (lambda: Margin(math.nan), "tau.*nan"),
        (lambda: Margin(None), "tau must be a number, not None"),
        (lambda: Margin(10**400), "tau must be a finite number >= 0"),
        (lambda: Window(-1), "size must be an integer >= 0, not -1"),
        (lambda: Window(math.nan), "size must be an integer"),
        (lambda: Window(2.0), "size must be an integer"),
        (lambda: Window(3, rule="never"), "'agree' or 'reconverge', not 'never'"),
        (lambda: Window(3, tail=-2), "tail must be an integer >= 0 or None"),
        (lambda: Window(3, across_rounds="yes"), "across_rounds must be True, False or None"),
        (lambda: Window(3, across_rounds=0.0), "across_rounds must be True, False or None"),
        (lambda: DraftModel("x.gguf", draft_max=0), "draft_max must be an integer >= 1"),
        (lambda: DraftModel("x.gguf", p_min=1.5), r"p_min must be in \[0, 1\], not 1.5"),
        (lambda: DraftModel("x.gguf", p_min=math.nan), "p_min"),
        (lambda: DraftModel("x.gguf", n_ctx=3), "n_ctx must be an integer >= 16"),
        (lambda: DraftModel("x.gguf", n_threads=513), r"n_threads must be an integer in 1..512, not 513"),
        (lambda: DraftModel("x.gguf", type_k=9999), "type_k must be a type that a KV cache can have"),
        (lambda: DraftModel("x.gguf", type_v=27), "type_v must be a type that a KV cache can have"),
        (lambda: PromptLookup(0), "max_ngram_size must be an integer in 1..64"),
        (lambda: PromptLookup(num_pred_tokens=0), "num_pred_tokens"),
        (lambda: PromptLookup(match="best"), "'latest' or 'earliest'"),
        (lambda: PromptLookup(match=[]), "'latest' or 'earliest'"),
        (lambda: PromptLookup(texts=None), "texts must be a sequence of paths"),
        (lambda: PromptLookup(texts=[["a"]]), "texts must be a sequence of paths"),
        (lambda: PromptLookup(memory_file=["a"]), "memory_file must be a path or None"),
    ],
)
def test_settings_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_kinds_of_settings(fly, tiny_target):
    gate, window, drafter = fly.gate, fly.window, fly.drafter
    with pytest.raises(ValueError, match=r"gate must be Exact\(\), .* not 0.3"):
        fly.gate = 0.3
    with pytest.raises(ValueError, match=r"unknown gate 'margn:0.3'. Did you mean 'margin'\?"):
        fly.gate = "margn:0.3"
    with pytest.raises(ValueError, match="theta must be"):
        fly.gate = "entropy:-1"
    with pytest.raises(ValueError, match=r"window must be Window\(...\), .*reconverge:6, or None, not 6"):
        fly.window = 6
    with pytest.raises(ValueError, match=r"draft model .*'draft.gguf'"):
        fly.drafter = "draft.gguf"
    with pytest.raises(ValueError, match="the list of drafters is empty; give at least one, or None"):
        fly.drafter = []
    with pytest.raises(
        ValueError, match=r'drafter is the class DraftModel; give one of it: DraftModel\("draft.gguf"\).'
    ):
        fly.drafter = DraftModel
    assert (fly.gate, fly.window, fly.drafter) == (gate, window, drafter)
    with pytest.raises(ValueError, match="either drafter= or draft_model=, not both"):
        FlyLlama(tiny_target, drafter=PromptLookup(), draft_model=lambda tokens: tokens, adaptive=False, **OPTIONS)


def test_a_setting_with_a_wrong_name(fly):
    names = {
        "gates": "gate",
        "gaet": "gate",
        "draftmax": "draft_max",
        "k_draft_max": "draft_max",
        "drafters": "drafter",
    }
    for name, near in names.items():
        with pytest.raises(ValueError, match=f"has no setting '{name}'. Did you mean '{near}'"):
            setattr(fly, name, 3)
        assert not hasattr(fly, name)
    with pytest.raises(ValueError, match=r"has no setting 'notes'.*subclass"):
        fly.notes = "mine"
    fly.cache, fly.lora_scale, fly._notes = None, 1.0, "mine"  # the base class's, and the caller's own


def test_subclasses_have_attributes_of_their_own(tiny_target):
    class Mine(FlyLlama):
        def __init__(self, *args, **kwargs):
            self.before = 1
            super().__init__(*args, **kwargs)
            self.notes = "mine"

    with closing(Mine(tiny_target, **OPTIONS)) as llm:
        llm.more = llm.before + 1
        assert (llm.notes, llm.more) == ("mine", 2)
        with pytest.raises(ValueError, match="Did you mean 'gate'"):
            llm.gaet = "exact"


def test_attributes_of_a_batch(tiny_target):
    """They would have set nothing."""
    with FlyBatch(tiny_target, 2, **OPTIONS) as batch:
        for name, where in (("gate", r"submit\(\)"), ("drafter", r"FlyBatch\(\)"), ("gaet", r"FlyBatch\(\)")):
            with pytest.raises(ValueError, match=f"'{name}' cannot be set on a FlyBatch that is loaded; .*{where}"):
                setattr(batch, name, "exact")
        assert "2 requests of 256 tokens" in repr(batch) and "gate exact" in repr(batch)
        handle = batch.submit("Tom", max_tokens=2)
        handle.result()
        assert "has ended" in repr(handle) and "closed" not in repr(batch)
    assert "closed" in repr(batch)
    with closing(FlyLlama(tiny_target, **OPTIONS)) as llm:
        assert "closed" not in repr(llm)
    assert "closed" in repr(llm)


def test_the_package_shows_its_own_names_alone():
    public = {name for name in dir(pyfly_cpp) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(pyfly_cpp, name))}
    assert public == {*pyfly_cpp.__all__, "decoding", "engine", "errors"} and "__version__" in dir(pyfly_cpp)
    assert all(getattr(pyfly_cpp, name).__name__.startswith("pyfly_cpp.") for name in modules)


def test_completion_shows_no_internal_names(tiny_target):
    with closing(FlyLlama(tiny_target, **OPTIONS)) as llm:
        shown = {*dir(llm)}
        assert all(hasattr(llm, name) for name in fly_llama._INTERNAL) and not shown & fly_llama._INTERNAL
        assert {"create_chat_completion", "drafter", "gate", "metadata", "records", "stats", "trace"} <= shown


CHAT = [{"role": "user", "content": "Tom has 3 apples"}]
WRONG = [
    ({"temperature": "hot"}, "temperature must be a finite number >= 0, not 'hot'"),
    ({"temperature": -1}, "temperature must be a finite number >= 0, not -1"),
    ({"temperature": float("inf")}, "temperature must be"),
    ({"temperature": None}, "temperature must be"),
    ({"top_p": "0.9"}, "top_p must be a number, not '0.9'"),
    ({"min_p": float("nan")}, "min_p must be a number"),
    ({"top_k": 2.5}, "top_k must be an integer, not 2.5"),
    ({"repeat_penalty": []}, "repeat_penalty must be a number"),
    ({"max_tokens": "many"}, "max_tokens must be a number of tokens, or None for no limit, not 'many'"),
    ({"seed": 1.5}, "seed must be an integer or None, not 1.5"),
]


@pytest.mark.parametrize("arguments, message", WRONG)
def test_sampling_that_is_none(fly, arguments, message):
    for ask in (
        lambda: fly("Tom", **arguments),
        lambda: list(fly.create_completion("Tom", stream=True, **arguments)),
        lambda: fly.create_chat_completion(messages=CHAT, **arguments),
        lambda: list(fly.write("Tom", **arguments)),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            ask()
        assert "\n" not in str(caught.value)
    assert fly("Tom", max_tokens=2, temperature=np.float32(0), top_k=np.int64(3))["choices"]


def test_sampling_of_tokens_and_of_a_batch(fly, tiny_target):
    with pytest.raises(ValueError, match="temperature must be"):
        fly.generate([5, 6], temp="hot")
    with FlyBatch(tiny_target, 2, **OPTIONS) as batch, pytest.raises(ValueError, match="temperature must be"):
        batch.submit("Tom", temperature=-0.5).result()


def test_arguments_with_a_wrong_name(fly, tiny_target):
    for ask in (fly, fly.create_completion):
        with pytest.raises(TypeError, match=r"completion has no argument 'max_token'. Did you mean 'max_tokens'"):
            ask("Tom", max_token=5)
    with pytest.raises(TypeError, match=r"create_chat_completion has no argument 'temprature'. Did you mean 'temp"):
        fly.create_chat_completion(messages=CHAT, temprature=0)
    with pytest.raises(TypeError, match=r"generate has no argument 'temperature'"):
        fly.generate([5, 6], temperature=0)
    with FlyBatch(tiny_target, 2, **OPTIONS) as batch:
        for prompt in ("Tom", CHAT):
            with pytest.raises(TypeError, match=r"submit has no argument 'max_token'. Did you mean 'max_tokens'"):
                batch.submit(prompt, max_token=5)


def test_parts_of_messages(fly, tiny_target):
    """Images need a chat handler; parts of text are a text."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    text = {"type": "text", "text": "Tom has "}

    def messages(*parts):
        return [{"role": "system", "content": "Count."}, {"role": "user", "content": list(parts)}]

    for part, named in ((image, "image_url"), ("words", "str"), ({"type": "text"}, "text"), ({}, "None")):
        with pytest.raises(ValueError, match=rf"messages\[1\] has a part of the type '?{named}'?.* takes text"):
            fly.create_chat_completion(messages=messages(text, part), max_tokens=4)
    options = {"max_tokens": 12, "temperature": 0}
    joined = fly.create_chat_completion(messages=messages(text, {"type": "text", "text": "3"}), **options)
    whole = [{"role": "system", "content": "Count."}, {"role": "user", "content": "Tom has 3"}]
    expected = fly.create_chat_completion(messages=whole, **options)
    assert joined["choices"][0]["message"] == expected["choices"][0]["message"]
    with FlyBatch(tiny_target, 2, **OPTIONS) as batch, pytest.raises(ValueError, match="image_url"):
        batch.submit(messages(image)).result()


def test_auto_may_be_assigned(tiny_target, monkeypatch):
    monkeypatch.setattr("pyfly_cpp.decoding.companions.embedded_model", lambda: None, raising=False)
    with closing(FlyLlama(tiny_target, **OPTIONS)) as llm:
        llm.drafter = "auto"
        with closing(FlyLlama(tiny_target, drafter="auto", **OPTIONS)) as other:
            assert (llm.drafter, llm.drafter_reason) == (other.drafter, other.drafter_reason)
        llm.drafter = None
        assert llm.drafter_reason is None


def test_nothing_leaks_where_nothing_is_to_be_printed(tiny_target, capfd):
    llm = FlyLlama(tiny_target, **{**OPTIONS, "n_ctx": 4096})  # trained on 2,048: llama.cpp would warn
    llm(SHORT, max_tokens=2)
    llm.close()
    assert capfd.readouterr() == ("", "")


def test_cache_types(tiny_target, tiny_draft, expected):
    for kind in (-5, 4, 9, 10, 27, 9999, "f16", True):
        for name in ("type_k", "type_v"):
            with pytest.raises(ValueError, match=rf"{name} must be a type that a KV cache can have.*not {kind!r}"):
                FlyLlama(tiny_target, flash_attn=True, **{name: kind}, **OPTIONS)
    with pytest.raises(ValueError, match=r"Q8_0 \(type_v\) needs flash attention; add flash_attn=True"):
        FlyLlama(tiny_target, type_v=8, flash_attn=False, **OPTIONS)
    with closing(FlyLlama(tiny_target, type_v=8, kernels="stock", **OPTIONS)) as llm:
        assert llm.context_params.flash_attn_type  # it is on where the cache needs it
    llm = FlyLlama(tiny_target, flash_attn=False, **OPTIONS)
    with pytest.raises(ValueError, match="draft's type_v is q8_0, which needs flash attention; load the target with"):
        llm.drafter = DraftModel(tiny_draft, type_v=8)
    for kind in CACHE_TYPES:
        llm.drafter = DraftModel(tiny_draft, type_k=kind)
        assert answer(llm) == expected[PROMPT]
    llm.close()
    for kind in CACHE_TYPES:
        llm = FlyLlama(
            tiny_target,
            drafter=DraftModel(tiny_draft, type_v=kind),
            flash_attn=True,
            type_k=kind,
            adaptive=False,
            **OPTIONS,
        )
        assert len(list(zip(range(5), llm.generate([5, 6, 7])))) == 5
        llm.close()


@pytest.mark.parametrize(
    ("wrong", "right"), [("n_ctxt", "n_ctx"), ("draftr", "drafter"), ("gates", "gate"), ("flash_atn", "flash_attn")]
)
def test_an_unknown_argument(wrong, right, tiny_target):
    with pytest.raises(ValueError, match=rf"no argument '{wrong}'. Did you mean '{right}'\?"):
        FlyLlama(tiny_target, **{wrong: 1})


def test_protected_tokens_outside_the_vocabulary(tiny_target):
    with pytest.raises(ValueError, match="99999"):
        FlyLlama(tiny_target, protected=[5, 99999], drafter=DraftModel(tiny_target), adaptive=False, **OPTIONS)


# ---- Versions --------------------------------------------------------------------------------------------------------


IMPORT_TWICE = """
import sys
import llama_cpp
llama_cpp.__version__ = sys.argv[1]
for _ in range(2):
    try:
        import pyfly_cpp
    except ImportError as error:
        print(type(error).__name__, error)
print(sorted(name for name in sys.modules if name.startswith("pyfly_cpp")))
"""


def import_twice(version, folder=None, **environment):
    command = [sys.executable, "-c", IMPORT_TWICE, version]
    env = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_import_with_another_release():
    """It is refused each time, and leaves nothing that could be used by halves."""
    first, second, modules = import_twice("0.1.2")
    assert first == second
    assert "VersionMismatchError" in first and "0.1.2 is installed" in first and "pip install" in first
    assert "'pyfly_cpp._native'" not in modules and "fly_llama" not in modules


def test_import_with_a_local_label_of_this_release():
    (modules,) = import_twice(llama_cpp.__version__ + "+cu124")
    assert "fly_llama" in modules


def test_the_command_that_rebuilds_has_the_folder_it_was_installed_from(tmp_path):
    installed = tmp_path / "pyfly_cpp-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pyfly-cpp\nVersion: 0.1.0\n")
    (installed / "direct_url.json").write_text('{"url": "file:///some%20where/pyfly", "dir_info": {}}')
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    assert "'/some where/pyfly'`" in import_twice("0.1.2", tmp_path, PYTHONPATH=path)[0]
    (installed / "direct_url.json").unlink()
    assert "pyfly-cpp pyfly-cpp`" in import_twice("0.1.2", tmp_path, PYTHONPATH=path)[0]


@pytest.mark.parametrize("how", ["script", "module"])
def test_a_command_with_another_release(how, tmp_path):
    """One sentence, no traceback: doctor is what one runs when something is wrong."""
    other = "import llama_cpp; llama_cpp.__version__ = '0.1.2'; import runpy, sys; "
    script = "sys.argv = ['/usr/bin/pyfly-cpp', 'doctor']; from pyfly_cpp.cli import main; main()"
    module = "sys.argv = ['-m', 'doctor']; runpy.run_module('pyfly_cpp', run_name='__main__')"
    code = other + (script if how == "script" else module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 1 and done.stdout == ""
    assert line.startswith("Error: pyfly-cpp was compiled") and "0.1.2 is installed" in line


# ---- Rows without a distribution -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_processor_that_destroys_the_row(fly, value):
    def destroys(input_ids, scores):
        if len(input_ids) < 60:
            return scores
        return np.full_like(scores, value)

    for settings in ({"temperature": 0}, {"temperature": 0.8, "seed": 1}):
        with pytest.raises(NotFiniteError, match=r"no distribution.*(model file|processors)"):
            fly(PROMPT, max_tokens=60, logits_processor=LogitsProcessorList([destroys]), **settings)


def test_what_a_processor_forces(fly):
    def force(input_ids, scores):
        scores[[300, 400]] = np.inf, -np.inf
        return scores

    for settings in ({"temperature": 0}, {"temperature": 0.8, "seed": 1}, {"temperature": 0.01, "repeat_penalty": 1.3}):
        generator = fly.generate(fly.tokenize(b"Once"), logits_processor=force, **{"temp": settings.pop("temperature")})
        assert [next(generator) for _ in range(5)] == [300] * 5
        found = fly("Once", max_tokens=5, logit_bias={300: math.inf, 301: -math.inf}, **settings)
        assert found["choices"][0]["text"] == fly.detokenize([300] * 5).decode()


def test_temperatures_that_logits_cannot_be_divided_by(tiny_target, tiny_draft, fly, expected):
    fly.gate = Stochastic()
    biased = fly("Once", max_tokens=5, temperature=0.2, logit_bias={300: 1e38}, seed=1)
    assert biased["choices"][0]["text"] == fly.detokenize([300] * 5).decode()
    drafters = {} if isinstance(fly.drafter, DraftModel) else {"drafter": PromptLookup()}
    with FlyBatch(tiny_target, n_parallel=2, gate=Stochastic(), **drafters, **OPTIONS) as batch:
        for temperature in (1e-7, 1e-38, 1e-40):
            found = fly(PROMPT, max_tokens=20, temperature=temperature, seed=1)["choices"][0]["text"]
            assert expected[PROMPT][0]["text"].startswith(found)
            warm, cold = (batch.submit(PROMPT, max_tokens=20, temperature=t, seed=1) for t in (0.8, temperature))
            assert warm.result(60)["choices"][0]["finish_reason"] == "length"
            assert cold.result(60)["choices"][0]["text"] == found


def test_a_model_with_nan_in_its_weights(tiny_target, tiny_draft, tmp_path):
    path = edit_gguf(tiny_target, tmp_path / "nan.gguf", tensors=with_nan)
    llm = FlyLlama(path, drafter=DraftModel(tiny_draft), adaptive=False, **OPTIONS)
    for _ in range(2):
        with pytest.raises(NotFiniteError, match=r"NaN.*check the model file"):
            answer(llm)


def test_a_draft_model_with_nan_in_its_weights(tiny_target, tiny_draft, tmp_path, expected):
    path = edit_gguf(tiny_draft, tmp_path / "nan.gguf", tensors=with_nan)
    llm = FlyLlama(tiny_target, drafter=DraftModel(path), adaptive=False, **OPTIONS)
    with pytest.raises(NotFiniteError, match=r"draft model.*check its file"):
        answer(llm)
    llm.drafter = None
    assert answer(llm) == expected[PROMPT]


# ---- Callbacks that raise --------------------------------------------------------------------------------------------


class MyError(Exception):
    pass


def test_a_processor_that_raises(fly):
    n_calls = []

    def raises(input_ids, scores):
        n_calls.append(1)
        if len(n_calls) == 7:
            raise MyError("mine")
        return scores

    with pytest.raises(MyError, match="mine"):
        fly(PROMPT, max_tokens=40, temperature=0, logits_processor=LogitsProcessorList([raises]))
    assert len(n_calls) == 7  # not asked again in that step


@pytest.mark.parametrize("result", ["text", None, [1.0, 2.0]], ids=str)
def test_a_processor_that_returns_something_else(fly, result):
    with pytest.raises(ValueError, match=r"could not convert|must return the scores"):
        fly(PROMPT, max_tokens=20, temperature=0, logits_processor=LogitsProcessorList([lambda ids, scores: result]))


def test_a_stopping_criterion_that_raises(fly):
    def raises(input_ids, logits):
        if len(input_ids) > 50:
            raise MyError("mine")
        return False

    with pytest.raises(MyError):
        fly(PROMPT, max_tokens=40, temperature=0, stopping_criteria=StoppingCriteriaList([raises]))


def test_a_bad_grammar(fly):
    grammar = LlamaGrammar.from_string('root ::= "a" missing', verbose=False)
    with pytest.raises(ValueError, match="grammar; check its rules"):
        fly(PROMPT, max_tokens=10, temperature=0, grammar=grammar)


def test_on_prefill_that_raises(tiny_target, expected):
    llm = FlyLlama(
        tiny_target, drafter=PromptLookup(), on_prefill=lambda done, total: 1 / 0, n_batch=32, adaptive=False, **OPTIONS
    )
    with pytest.raises(ZeroDivisionError):
        llm([300] * 200, max_tokens=2)
    llm.on_prefill = None
    assert answer(llm) == expected[PROMPT]


# ---- Interrupts ------------------------------------------------------------------------------------------------------


def test_an_interrupt_during_a_step(tiny_target, expected):
    """Ctrl-C while C runs: heard when the step is over."""
    steps = []

    def drafter(history):
        steps.append(len(history))
        if len(steps) == 5:
            signal.raise_signal(signal.SIGINT)
        return history[-3:]

    llm = FlyLlama(tiny_target, drafter=drafter, adaptive=False, **OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        for _ in llm(PROMPT, max_tokens=100, temperature=0, stream=True):
            pass
    assert len(steps) == 5
    for prompt in (PROMPT, SHORT):
        assert answer(llm, prompt) == expected[prompt]


def test_an_interrupt_inside_a_processor(fly):
    """ctypes would print it and go on; so it waits for the end of the step. The handler is the caller's own again."""
    calls = []

    def processor(input_ids, scores):
        calls.append(1)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return scores

    with pytest.raises(KeyboardInterrupt):
        fly(PROMPT, max_tokens=100, temperature=0, logits_processor=LogitsProcessorList([processor]))
    assert len(calls) < 20
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_from_outside(tiny_target, tiny_draft):
    """In a process of its own, as a user does it; it goes on afterwards."""
    code = f"""
        import sys, time
        from pyfly_cpp import FlyLlama, DraftModel
        llm = FlyLlama({tiny_target!r}, drafter=DraftModel({tiny_draft!r}), n_ctx=2048, n_threads=1, verbose=False)
        bias = {{1533: -100.0, 1535: -100.0}}
        print("ready", flush=True)
        try:
            while True:
                llm.reset()
                for _ in llm({PROMPT!r}, max_tokens=None, temperature=0, stream=True, logit_bias=bias):
                    pass
        except KeyboardInterrupt:
            stopped = time.time()
        print("stopped", stopped, flush=True)
        print(llm({PROMPT!r}, max_tokens=40, temperature=0)["choices"][0]["text"] == {{expected!r}}, flush=True)
    """
    base = llama_cpp.Llama(tiny_target, **OPTIONS)
    code = textwrap.dedent(code).replace("{expected!r}", repr(answer(base)[0]["text"]))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().strip() == "ready"
        time.sleep(0.5)
        sent = time.time()
        os.kill(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    stopped, right = output.strip().splitlines()
    assert float(stopped.split()[1]) - sent < 2, errors
    assert right == "True"


def test_an_interrupt_during_the_prompt(tiny_target, expected):
    """A long prompt is evaluated batch by batch; an interrupt is heard between them."""
    llm = FlyLlama(tiny_target, drafter=PromptLookup(), adaptive=False, **{**OPTIONS, "n_ctx": 1024, "n_batch": 32})
    seen = []

    def on_prefill(done, total):
        seen.append((done, total))
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)

    llm.on_prefill = on_prefill
    with pytest.raises(KeyboardInterrupt):
        llm([300] * 500, max_tokens=2)
    assert seen == [(32, 500), (64, 500), (96, 500)]
    llm.on_prefill = None
    assert answer(llm) == expected[PROMPT]


# ---- Callers that stop -----------------------------------------------------------------------------------------------


def assert_consistent(llm, tokens):
    """n_tokens, input_ids and the KV cache say the same: the first n_tokens tokens are evaluated, and no more."""
    assert list(llm.eval_tokens) == tokens[: llm.n_tokens]
    memory = llama_cpp.llama_get_memory(llm.ctx)
    assert llama_cpp.llama_memory_seq_pos_max(memory, 0) == llm.n_tokens - 1


def test_a_generator_closed_in_mid_step(fly):
    prompt = fly.tokenize(PROMPT.encode())
    whole = fly.generate(prompt, temp=0.0)
    tokens = prompt + [next(whole) for _ in range(40)]
    whole.close()
    for n in range(1, 24):
        generator = fly.generate(prompt, temp=0.0)
        found = [next(generator) for _ in range(n)]
        if n % 2:
            generator.close()
        else:
            del generator
            gc.collect()
        assert found == tokens[len(prompt) : len(prompt) + n]
        assert fly.n_tokens == len(prompt) + n - 1
        assert_consistent(fly, tokens)
        if n % 3 == 0:  # and goes on from there with the base class's own means
            fly.eval(found[-1:])
            assert fly.sample(temp=0.0) == tokens[len(prompt) + n]


def test_a_stream_that_is_dropped(fly, expected):
    for n in (1, 4, 9):
        stream = fly(PROMPT, max_tokens=40, temperature=0, stream=True)
        for _ in range(n):
            next(stream)
        del stream
        fly.generate([1, 2, 3])  # never started
        assert answer(fly) == expected[PROMPT]


# ---- Two users of one object -----------------------------------------------------------------------------------------


def test_two_interleaved_generations(fly, expected):
    first = fly(PROMPT, max_tokens=40, temperature=0, stream=True)
    next(first)
    next(first)
    second = fly(SHORT, max_tokens=40, temperature=0, stream=True)
    chunks = [next(second)["choices"][0]["text"]]
    with pytest.raises(BusyError, match=r"another generation was started.*(one FlyLlama for each|exhaust or close)"):
        for _ in first:
            pass
    chunks += [chunk["choices"][0]["text"] for chunk in second]  # the newer one is not harmed
    assert "".join(chunks) == expected[SHORT][0]["text"]


def test_two_threads(tiny_target, expected):
    """One gets the lock; the other a clear error, and neither a wrong text."""
    in_step, go_on = threading.Event(), threading.Event()

    def waits(history):
        in_step.set()
        assert go_on.wait(30)
        return []

    llm = FlyLlama(tiny_target, drafter=waits, adaptive=False, **OPTIONS)
    result = []
    thread = threading.Thread(target=lambda: result.append(answer(llm)))
    thread.start()
    try:
        assert in_step.wait(30)
        for call in (
            lambda: answer(llm, SHORT),
            lambda: setattr(llm, "drafter", None),
            llm.save_state,
        ):
            with pytest.raises(BusyError, match=r"another thread.*use one FlyLlama per thread"):
                call()
    finally:
        go_on.set()
        thread.join()
    assert result == [expected[PROMPT]]
    assert answer(llm, SHORT) == expected[SHORT]


def test_the_state_changes_during_a_generation(fly):
    state = fly.save_state()
    changes = [fly.reset, lambda: fly.eval([300]), lambda: fly.load_state(state), lambda: setattr(fly, "drafter", None)]
    drafter = fly.drafter
    for change in changes:
        generator = fly.generate(fly.tokenize(PROMPT.encode()), temp=0.0)
        next(generator)
        next(generator)
        change()
        with pytest.raises(BusyError, match=r"(state was changed|another generation was started).*close"):
            for _ in range(20):
                next(generator)
        fly.drafter = drafter


def test_a_state_of_another_model(fly, tiny_qwen35):
    other = llama_cpp.Llama(tiny_qwen35, **OPTIONS)
    other(SHORT, max_tokens=5)
    with pytest.raises(NativeError, match="refused the saved state: it comes from another model"):
        fly.load_state(other.save_state())
    assert fly.n_tokens == 0


# ---- The end ---------------------------------------------------------------------------------------------------------


def test_objects_do_not_pile_up(tiny_target, tiny_draft):
    """Without close(), and after an abandoned generation."""
    import weakref

    references = []
    for _ in range(3):
        llm = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft), adaptive=False, **OPTIONS)
        generator = llm.generate([300, 301], temp=0.0)
        next(generator)
        references.append(weakref.ref(llm))
        del llm, generator
    gc.collect()
    assert [r() for r in references] == [None] * 3
