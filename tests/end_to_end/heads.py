"""What tests on the tiny models share: models, prompts, checks, scripted drafters, and a model with random weights."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from gguf_write import copy_field, write

TESTS = Path(__file__).parents[1]
TINY = TESTS.parent / "models" / "tiny"
HYBRID = TINY / "tiny-qwen35-mtp-f16.gguf"
LLAMA = TINY / "tiny-llama-target-f16.gguf"
EAGLE3 = TINY / "tiny-llama-eagle3-f16.gguf"
DFLASH = TINY / "tiny-llama-dflash-f16.gguf"
DSPARK = TINY / "tiny-llama-dspark-f16.gguf"
DRAFT = TINY / "tiny-llama-draft-f16.gguf"
PROMPT = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
SHORT = "Tom has 3 apples and 4 pears."
SETTINGS = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "verbose": False}
N_VOCAB = 1536
TOLERANCE = {HYBRID: 4e-3, LLAMA: 1e-3}  # twice the noise between batched and single evaluation


def prompts(n):
    lines = (TESTS / "data" / "half_documents.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:n]]


def generate(llm, prompt, n=96):
    """Greedy tokens from an empty context up to the end of the text; returns (prompt's tokens, new tokens)."""
    tokens = llm.tokenize(prompt.encode("utf-8"), add_bos=False, special=True)
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    llm.reset()
    stream, out = llm.generate(tokens, temp=0.0), []
    for token in itertools.islice(stream, n):
        out.append(token)
        if llama_cpp.llama_vocab_is_eog(vocab, token):
            break
    stream.close()
    return tokens, out


def single_rows(reference, prompt, tokens):
    """The row behind the prompt and behind each token but the last, each evaluated alone."""
    reference.reset()
    reference.eval(prompt)
    rows = []
    for token in tokens:
        rows.append(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(reference.ctx, -1), (N_VOCAB,)).copy())
        reference.eval([token])
    return rows


def worst_gap(reference, prompt, tokens):
    """Teacher forcing: the most that any token is below the maximum of the row behind its own context."""
    return max(float(row.max() - row[token]) for row, token in zip(single_rows(reference, prompt, tokens), tokens))


def answer(llm, prompt=PROMPT, n=40):
    """The greedy choices of a completion."""
    return llm(prompt, max_tokens=n, temperature=0)["choices"]


def right_answers(path, options):
    """What a plain `llama_cpp.Llama` answers, by prompt."""
    base = llama_cpp.Llama(path, **options)
    answers = {prompt: answer(base, prompt) for prompt in (PROMPT, SHORT)}
    base.close()
    return answers


def at_once(work, arguments):
    """Calls `work` with each argument, all at once, in threads; returns when all are done."""
    threads = [threading.Thread(target=work, args=(one,)) for one in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def take(stream, n):
    out = list(itertools.islice(stream, n))
    stream.close()
    return out


class Script:
    """A drafter: proposes the continuation in `text` with one wrong token, whose depth runs through all of them."""

    def __init__(self, k, text=()):
        self.k, self.n_calls, self.text = k, 0, list(text)

    def __call__(self, history):
        draft = self.text[len(history) : len(history) + self.k]
        wrong = self.n_calls % (self.k + 1)  # k: none
        self.n_calls += 1
        if wrong < len(draft):
            draft[wrong] = (draft[wrong] + 1) % 1500
        return np.array(draft, dtype=np.intc)


def second_choice(reference, every):
    """A drafter: the target's second choice where the text has a multiple of `every` tokens; behind it, since silence
    would decide a window under reconverge, a control token, which is rejected."""

    def draft(history):
        if len(history) % every:
            return np.array([N_VOCAB - 1], dtype=np.intc)
        order = single_rows(reference, [int(t) for t in history], [0])[0].argsort()[::-1]
        return np.array([next(int(t) for t in order[1:] if t < 1500)], dtype=np.intc)

    return draft


def chained_model(destination, n_heads=2):
    """A model with random weights and several chained NextN blocks (architecture hy_v3). Trunk and blocks do little but
    pass the token's embedding on, so the blocks often guess what the trunk says."""
    n_embd, n_head, n_trunk, n_ff = 64, 4, 2, 96
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(destination), "hy_v3")
    for name, entry in gguf.GGUFReader(LLAMA).fields.items():
        if name.startswith("tokenizer."):
            copy_field(writer, name, entry)
    for name, value in {
        "context_length": 1024, "embedding_length": n_embd, "block_count": n_trunk + n_heads,
        "feed_forward_length": n_ff, "attention.head_count": n_head, "nextn_predict_layers": n_heads,
        "expert_feed_forward_length": 32,
    }.items():  # fmt: skip
        writer.add_uint32(f"hy_v3.{name}", value)
    writer.add_float32("hy_v3.attention.layer_norm_rms_epsilon", 1e-5)

    arrays = {}

    def random(name, *shape, scale=0.3):
        values = rng.normal(size=shape) * scale / np.sqrt(shape[-1])
        arrays[f"{name}.weight"] = values.astype(np.float32)

    def ones(name, n=n_embd):
        arrays[f"{name}.weight"] = np.ones(n, dtype=np.float32)

    random("token_embd", N_VOCAB, n_embd, scale=8.0)
    random("output", N_VOCAB, n_embd, scale=8.0)
    ones("output_norm")
    for i in range(n_trunk + n_heads):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            random(f"blk.{i}.{name}", n_embd, n_embd, scale=1.0)
        for name in ("attn_q_norm", "attn_k_norm"):
            ones(f"blk.{i}.{name}", n_embd // n_head)
        for name in ("attn_norm", "ffn_norm"):
            ones(f"blk.{i}.{name}")
        random(f"blk.{i}.ffn_gate", n_ff, n_embd)
        random(f"blk.{i}.ffn_up", n_ff, n_embd)
        random(f"blk.{i}.ffn_down", n_embd, n_ff)
        if i >= n_trunk:
            both = np.concatenate([np.eye(n_embd), 0.2 * rng.normal(size=(n_embd, n_embd)) / 8], axis=1)
            arrays[f"blk.{i}.nextn.eh_proj.weight"] = both.astype(np.float32)
            for name in ("nextn.enorm", "nextn.hnorm"):
                ones(f"blk.{i}.{name}")
    write(writer, arrays)
    return Path(destination)


def error_in_subprocess(code, *paths):
    """Runs code that should raise; returns "Type: message". A process that ends otherwise fails the test."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom pyfly_cpp import *\nfrom pyfly_cpp.errors import *\n"
        "settings = dict(n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)\n"
        "paths = [Path(p) for p in sys.argv[1:]]\n"
        "try:\n" + "".join(f"    {line}\n" for line in code.splitlines()) + "except Exception as e:\n"
        "    print(f'{type(e).__name__}: {e}')\n"
        "else:\n    print('no error')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, paths)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"the process ended with {done.returncode}: {done.stderr[-500:]}"
    return done.stdout.strip().splitlines()[-1]
