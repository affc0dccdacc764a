"""Losslessness of a greedy text, measured on logits. Comparing strings gives false alarms: llama.cpp's rows of one
token evaluated alone and of the same token in a batch differ by the noise of its kernels, which moves a near tie.

- `teacher_forcing_gap`: how far each token is from the argmax of a fresh single-token evaluation of its own context.
  Within the noise, that is twice the difference between the two kinds of rows.
- `replay`: the rows of the very batches that the trace says were evaluated. There is no noise between these and what
  the engine saw: every token must be their argmax.
"""

from __future__ import annotations

import contextlib
import itertools

import llama_cpp
import numpy as np


@contextlib.contextmanager
def fresh_model(model_path, n_ctx, n_threads):
    llm = llama_cpp.Llama(
        model_path, n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads, flash_attn=True, verbose=False
    )
    try:
        yield llm
    finally:
        llm.close()


def evaluate(llm, batch, n_past, n_rows):
    """Evaluates a batch behind the first n_past tokens; returns the rows of its last n_rows tokens."""
    llm._ctx.kv_cache_seq_rm(-1, n_past, -1)
    llm._batch.set_batch(batch=batch, n_past=n_past, logits_all=False)
    for i in range(len(batch)):
        llm._batch.batch.logits[i] = i >= len(batch) - n_rows
    llm._ctx.decode(llm._batch)
    pointers = [llama_cpp.llama_get_logits_ith(llm.ctx, i) for i in range(len(batch) - n_rows, len(batch))]
    return [np.ctypeslib.as_array(pointer, (llm.n_vocab(),)).copy() for pointer in pointers]


def rows_one_by_one(model_path, tokens, n_prompt, n_ctx=1024, n_threads=1):
    """The rows behind the prompt's last token and behind every later token but the last, each evaluated alone."""
    with fresh_model(model_path, n_ctx, n_threads) as llm:
        rows = evaluate(llm, tokens[:n_prompt], 0, 1)
        for i in range(n_prompt, len(tokens) - 1):
            rows += evaluate(llm, tokens[i : i + 1], i, 1)
        return rows


def gap(rows, tokens):
    """For every token: the largest logit of its row - its own."""
    return np.array([float(row.max() - row[token]) for row, token in zip(rows, tokens)])


def teacher_forcing_gap(model_path, tokens, n_prompt, n_ctx=1024, n_threads=1):
    """For every token behind the prompt: how far it is from the argmax of a fresh evaluation of its own context."""
    return gap(rows_one_by_one(model_path, tokens, n_prompt, n_ctx, n_threads), tokens[n_prompt:])


def replay(model_path, tokens, n_prompt, records, n_ctx=1024, n_threads=1):
    """The row behind every new token, out of the batches of its `Record`s. The prompt must have been evaluated whole,
    in one batch, and no token may end the text (the rest of such a draft is in no record)."""
    with fresh_model(model_path, n_ctx, n_threads) as llm:
        rows, n_past = [], 0
        for _, of_step in itertools.groupby(records, key=lambda record: record.round):
            of_step = list(of_step)
            begin = of_step[0].position  # tokens[begin - 1] is the newest one that is not evaluated yet
            matched = [record.token for record in of_step if record.origin == "matched"]
            draft = [*matched, *of_step[-1].rejected]
            found = evaluate(llm, [*tokens[n_past:begin], *draft], n_past, len(draft) + 1)
            rows += found[: len(of_step)]
            n_past = begin + len(of_step) - 1
        return rows
