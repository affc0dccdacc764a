"""What is used of llama-cpp-python without being promised: each test fails for something that another release could
change without an error. CONTRIBUTING.md, "A new release of llama-cpp-python"."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest
from gguf_edit import edit_gguf
from llama_cpp import _ggml, _logger, llama_chat_format, llama_grammar

from pyfly_cpp import _native
from pyfly_cpp.engine.vocabulary import Vocabulary
from pyfly_cpp.llama import completions, guarded_llama, prompting
from pyfly_cpp.machine.releases import SPLIT_BY_OWN_CODE

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"


@pytest.fixture(scope="module")
def plain(tiny_target):
    llm = llama_cpp.Llama(tiny_target, n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False)
    yield llm
    llm.close()


# ---- The library -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="names as GCC mangles them")
def test_functions_without_a_header_are_exported():
    source = (CSRC / "llama" / "packed_buffers.cpp").read_text()
    names = re.findall(r'look_up\([\w.]+, "(\w+)"\)', source)
    assert len(names) == 4
    libraries = [ctypes.CDLL(str(path)) for path in Path(llama_cpp.__file__).parent.glob("lib/libggml*.so")]
    missing = [name for name in names if not any(hasattr(library, name) for library in libraries)]
    assert missing == [], "the kernels cannot be offered to llama.cpp"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the kernels are for x86-64")
def test_the_kernels_find_their_place_among_the_buffer_types():
    if _native.kernels_isa() == "none":
        pytest.skip("this processor has no AVX2")
    _native.enable_kernels()  # raises NativeError where ggml's structures are not as expected


def test_samplers_have_the_names_that_the_core_knows(plain):
    make = {
        "greedy": lambda: llama_cpp.llama_sampler_init_greedy(),
        "dist": lambda: llama_cpp.llama_sampler_init_dist(1),
        "top-k": lambda: llama_cpp.llama_sampler_init_top_k(40),
        "typical": lambda: llama_cpp.llama_sampler_init_typical(0.9, 1),
        "top-p": lambda: llama_cpp.llama_sampler_init_top_p(0.9, 1),
        "min-p": lambda: llama_cpp.llama_sampler_init_min_p(0.1, 1),
        "temp": lambda: llama_cpp.llama_sampler_init_temp(0.5),
        "temp-ext": lambda: llama_cpp.llama_sampler_init_temp_ext(0.5, 0.1, 1.0),
        "xtc": lambda: llama_cpp.llama_sampler_init_xtc(0.5, 0.1, 1, 1),
        "mirostat": lambda: llama_cpp.llama_sampler_init_mirostat(100, 1, 5.0, 0.1, 100),
        "mirostat-v2": lambda: llama_cpp.llama_sampler_init_mirostat_v2(1, 5.0, 0.1),
        "top-n-sigma": lambda: llama_cpp.llama_sampler_init_top_n_sigma(1.0),
        "adaptive-p": lambda: llama_cpp.llama_sampler_init_adaptive_p(0.5, 0.5, 1),
        "grammar": lambda: llama_cpp.llama_sampler_init_grammar(plain._model.vocab, b'root ::= "a"', b"root"),
    }
    source = (CSRC / "llama" / "chain_sampler.cpp").read_text()
    tables = re.findall(r"std::array<const char \*, \d+> names = \{(.*?)\};", source, re.DOTALL)
    assert len(tables) == 2
    known = set(re.findall(r'"([\w-]+)"', " ".join(tables))) | {"grammar"}
    assert known == set(make)
    for name, init in make.items():
        sampler = init()
        assert llama_cpp.llama_sampler_name(sampler).decode().lstrip("?+-") == name
        llama_cpp.llama_sampler_free(sampler)


def test_a_sampler_that_does_nothing_is_marked():
    sampler = llama_cpp.llama_sampler_init_top_k(0)
    assert llama_cpp.llama_sampler_name(sampler).startswith(b"?")
    llama_cpp.llama_sampler_free(sampler)


CHILD = """
import sys, llama_cpp
for path in sys.argv[1:]:
    llm = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    llm.tokenize(b"x" * 40_000)
    llm.close()
"""


@pytest.mark.slow
def test_vocabularies_split_by_code_take_long_words(tiny_target, tmp_path):
    """llama.cpp has to split the texts of these without std::regex, which would end the process."""
    paths = [
        edit_gguf(tiny_target, tmp_path / f"{pre}.gguf", {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre})
        for pre in sorted(SPLIT_BY_OWN_CODE)
    ]
    done = subprocess.run([sys.executable, "-c", CHILD, *map(str, paths)], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)


# ---- The binding -----------------------------------------------------------------------------------------------------


def test_structures_are_laid_out_as_in_the_library():
    """A field that the binding lacks, or has in another order, shifts the defaults of those behind it."""
    model = llama_cpp.llama_model_default_params()
    assert [model.n_gpu_layers, model.split_mode, model.main_gpu] == [-1, 1, 0]
    flags = ("vocab_only", "check_tensors", "use_extra_bufts", "no_host", "load_mtp")
    assert [name for name in flags if getattr(model, name, False)] == ["use_extra_bufts"]
    context = llama_cpp.llama_context_default_params()
    assert [context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max, context.n_rs_seq] == [
        512, 2048, 512, 1, 0,
    ]  # fmt: skip
    assert [context.flash_attn_type, context.yarn_orig_ctx, context.type_k, context.type_v] == [-1, 0, 1, 1]
    assert [context.embeddings, context.offload_kqv, context.op_offload, context.n_samplers] == [False, True, True, 0]
    quantise = llama_cpp.llama_model_quantize_default_params()
    assert [quantise.nthread, quantise.quantize_output_tensor, quantise.only_copy] == [0, True, False]


def test_attributes_of_llama(plain):
    used = {
        "_model", "_ctx", "_batch", "_stack", "_n_ctx", "_n_vocab", "_logits_all", "_chat_handlers", "model_params",
        "context_params", "input_ids", "scores", "n_tokens", "n_batch", "n_threads", "n_threads_batch", "tokenizer_",
        "metadata", "kv_overrides", "tensor_split", "lora_path", "lora_scale", "cache", "spm_infill", "chat_format",
        "draft_model", "verbose", "model_path",
    }  # fmt: skip
    assert used <= set(vars(plain))
    ours = {"vocabulary", "loaded", "_context_params", "_bytes_of_context"}
    declared = set(guarded_llama.GuardedLlama.__annotations__) - ours
    assert declared <= used
    assert plain._ctx.ctx and plain._model.model and plain._model.vocab


def test_the_base_class_loads_after_it_assigned_the_parameters(tiny_target):
    """`GuardedLlama` adds its own where the base class assigns them."""
    order = []

    class Watched(llama_cpp.Llama):
        def __setattr__(self, name, value):
            order.append(name)
            super().__setattr__(name, value)

    Watched(tiny_target, n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False).close()
    assert order.index("model_params") < order.index("_model")
    assert order.index("context_params") < order.index("_ctx")


def test_names_of_modules_that_are_not_public():
    assert 3 in _logger.GGML_LOG_LEVEL_TO_LOGGING_LEVEL
    assert _ggml.libggml is not None
    assert llama_chat_format.LlamaChatCompletionHandlerRegistry()._chat_handlers
    assert {"string", "integer"} <= set(llama_grammar.PRIMITIVE_RULES)


def test_chat_templates_only_format_and_stop_at_what_ends_a_text(plain):
    """Else each chat would copy the row of every token, and have a thread of its own in a `FlyBatch`."""
    plain.vocabulary = vocabulary = Vocabulary(plain._model.vocab, contextlib.nullcontext)
    heard = prompting.hear_chat(plain, [{"role": "user", "content": "Hello"}], temperature=0.0)
    assert len(heard["stopping_criteria"]) == 1 and completions._needed(heard["stopping_criteria"], plain) is None
    other = llama_chat_format.Jinja2ChatFormatter("x", "", "", stop_token_ids=[5])(messages=[]).stopping_criteria
    assert not vocabulary.ends_text(5) and completions._needed(other, plain) == other
    assert completions.Chat.is_served(plain)
    plain.chat_format = "chatml-function-calling"
    assert not completions.Chat.is_served(plain)
