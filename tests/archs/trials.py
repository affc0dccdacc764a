"""What every architecture must do, run in a process of its own: `python trials.py MODEL.gguf TRIAL...`.

Prints a line before each trial and its outcome behind it, in JSON: {"trial": "exact", "gap": 0.001, "logprob": 0.002,
"tolerance": 0.005, ...}, or {"trial": "exact", "error": "ValueError: ..."}. `gap` is how far the chosen tokens are
below the favourites of a fresh evaluation of their own context, which takes the new tokens one by one; `logprob` is how
far the reported log-probability of a token is from its own there. Both are the largest of the trial, in nats;
`tolerance` is what they may be.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from contextlib import closing
from pathlib import Path

import llama_cpp
import numpy as np

from pyfly_cpp import (
    MTP,
    ContextFullError,
    DraftModel,
    FlyBatch,
    FlyLlama,
    Margin,
    PromptLookup,
    Window,
    _native,
)
from pyfly_cpp.machine import exactness, kernels

N_TRAINED = 256  # tokens, of every model of the generator
N_DRAFT = 4
N_NEW = 24
# With caches of F32, a batch and single tokens differ by the noise of F32 alone.
SETTINGS = {"n_threads": 1, "n_threads_batch": 1, "type_k": 0, "type_v": 0, "verbose": False}
DEFAULTS = {"n_ctx": N_TRAINED, "adaptive": False, "trace": True, **SETTINGS}
LOOSE = {"gate": Margin(1.5), "window": Window(3, rule="reconverge")}


def last_row(llm):
    """The row behind the last token that was evaluated."""
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),)).copy()


def fresh_rows(llm, prompt, tokens):
    """The rows behind the prompt and behind each token but the last, each evaluated alone."""
    llm.reset()
    llm.eval(prompt)
    rows = []
    for i, token in enumerate(tokens):
        rows.append(last_row(llm))
        if i + 1 < len(tokens):
            llm.eval([token])
    return rows


class Drafter:
    """The plain continuation of any text, up to n tokens of it, with one token that is not the favourite, whose depth
    runs through all of them. Every second time it is the runner-up, and what follows continues it: a loose gate may let
    it stand."""

    def __init__(self, reference, n):
        self.reference, self.n, self.n_calls, self.rng = reference, n, 0, random.Random(n)

    def __call__(self, history):
        text, draft = [int(token) for token in history], []
        n = min(self.rng.choice((0, 1, 2, self.n, self.n)), N_TRAINED - 1 - len(text))
        depth, is_near = self.n_calls % (self.n + 1), self.n_calls % 2
        self.n_calls += 1
        self.reference.reset()
        for i in range(n):
            self.reference.eval(draft[-1:] or text)
            order = last_row(self.reference).argsort()[::-1]
            draft.append(order[0 if i != depth else 1 if is_near else len(order) // 2])
        return np.array(draft, dtype=np.intc)


class World:
    """A model, and a plain `llama_cpp.Llama` of it to compare with."""

    def __init__(self, path):
        self.path = path
        self.reference = llama_cpp.Llama(path, n_ctx=N_TRAINED, **SETTINGS)
        self.drafter = Drafter(self.reference, N_DRAFT)

    def close(self):
        self.reference.close()

    def sensitivity(self):
        """How much a row depends on the earlier half of its context: the largest change of a logit."""
        text = self.prompt(1, 40)
        row = fresh_rows(self.reference, text, [0])[0]
        other = [*text[:19], *self.prompt(2, 20), text[-1]]
        return float(np.abs(fresh_rows(self.reference, other, [0])[0] - row).max())

    def noise(self, **options):
        """How far rows are off in any batch: the largest change of a logit between a text of 80 tokens that a plain
        `llama_cpp.Llama` takes in one batch, and the same one by one."""
        llm = llama_cpp.Llama(self.path, n_ctx=N_TRAINED, logits_all=True, **{**SETTINGS, **options})
        worst = 0.0
        for seed in range(4):
            text, rows = self.prompt(seed, 80), []
            for n in (1, len(text)):
                llm.reset()
                for i in range(0, len(text), n):
                    llm.eval(text[i : i + n])
                rows.append(llm.scores[: len(text)].copy())
            worst = max(worst, float(np.abs(rows[0] - rows[1]).max()))
        llm.close()
        return worst

    def tolerance(self, name, off):
        """`tolerance`, or twice the noise where the trial is off by more; no more than 20 times as much, since a graph
        that is wrong in batches has such noise, too."""
        least = tolerance(name)
        if off <= least:
            return least
        noise = self.noise(**({"flash_attn": True, "type_k": 1, "type_v": 1} if is_many(name) else {}))
        return min(max(least, 2 * noise), 20 * least)

    def prompt(self, seed, n):
        rng = random.Random(seed)
        return [rng.randrange(1, min(self.reference.n_vocab(), 128)) for _ in range(n)]

    def prompts(self, n):
        """Of uneven lengths; longer ones pass the sliding window of 32 tokens."""
        return [self.prompt(i, length) for i, length in zip(range(n), itertools.cycle((5, 40, 17, 60)))]

    def opened(self, **options):
        return FlyLlama(self.path, **{**DEFAULTS, **options})

    def batch(self, n, **options):
        return FlyBatch(self.path, n, **{**DEFAULTS, "flash_attn": False, **options})

    def measure(self, prompt, records):
        """Compares what was committed with a fresh evaluation."""
        gap = logprob = 0.0
        rows = fresh_rows(self.reference, prompt, [record.token for record in records])
        for record, row in zip(records, rows):
            row = row.astype(np.float64)
            gap = max(gap, float(row.max() - row[record.choice]))
            own = float(row[record.token] - row.max() - np.log(np.exp(row - row.max()).sum()))
            logprob = max(logprob, abs(own - record.logprob))
        return gap, logprob

    def run(self, llm, prompt, n=N_NEW):
        """Generates; returns the records."""
        stream = llm.generate(prompt, temp=0.0)
        for _ in itertools.islice(stream, n):
            pass
        stream.close()
        return list(llm.records)[:n]

    def worst(self, pairs):
        measures = [self.measure(prompt, records) for prompt, records in pairs]
        origins = [record.origin for _, records in pairs for record in records]
        counts = {origin: origins.count(origin) for origin in ("matched", "loose")}
        return {"gap": max(gap for gap, _ in measures), "logprob": max(logprob for _, logprob in measures), **counts}

    def alone(self, **options):
        with closing(self.opened(**options)) as llm:
            return self.worst([(prompt, self.run(llm, prompt)) for prompt in self.prompts(2)])

    def together(self, n, prompts=None, lengths=(24, 12, 32, 40), **options):
        """Two requests more than there is room for."""
        prompts = prompts or self.prompts(n + 2)
        with self.batch(n, **options) as batch:
            handles = [
                batch.submit(prompt, max_tokens=length, temperature=0.0)
                for prompt, length in zip(prompts, itertools.cycle(lengths))
            ]
            for handle in handles:
                handle.result()
            return self.worst([(prompt, handle.records) for prompt, handle in zip(prompts, handles)])


def is_many(name):
    """Whether the trial of this name has flash attention, and with it the noise of F16."""
    return name.startswith("many")


def tolerance(name):
    """Nats, of the trial of this name: five times the noise of most models. A wrong cache is off by more than 0.5."""
    if name == "bits":
        return 0.0
    return 0.15 if is_many(name) else 5e-3


TRIALS = {}


def trial(function):
    TRIALS[function.__name__] = function
    return function


@trial
def plain(world):
    """One request, no drafts."""
    return world.alone()


@trial
def exact(world):
    """One request, rejections at every depth."""
    return world.alone(drafter=world.drafter, draft_max=N_DRAFT)


@trial
def margin(world):
    """One request, loose, with windows across steps that hold or break."""
    return world.alone(drafter=world.drafter, draft_max=N_DRAFT, **LOOSE)


@trial
def deep(world):
    """One request, 20 drafts in a step."""
    return world.alone(drafter=Drafter(world.reference, 20), draft_max=20)


@trial
def draft(world):
    """A draft model: the model itself."""
    return world.alone(drafter=DraftModel(world.path), draft_max=N_DRAFT)


@trial
def governed(world):
    """Drafters that the governor chooses."""
    return world.alone(drafter=[PromptLookup(max_ngram_size=2), DraftModel(world.path)], adaptive=True)


@trial
def batch_plain(world):
    """Three requests, no drafts."""
    return world.together(3)


@trial
def batch(world):
    """Three requests, rejections at every depth."""
    return world.together(3, drafter=world.drafter, draft_max=N_DRAFT)


@trial
def batch_margin(world):
    """Three requests, loose."""
    return world.together(3, drafter=world.drafter, draft_max=N_DRAFT, **LOOSE)


@trial
def many(world):
    """Eight requests, rejections at every depth; with flash attention, as a FlyBatch has it by default."""
    return world.together(8, flash_attn=None, drafter=world.drafter, draft_max=N_DRAFT)


@trial
def many_margin(world):
    """Eight requests, loose; with flash attention."""
    return world.together(8, flash_attn=None, drafter=world.drafter, draft_max=N_DRAFT, **LOOSE)


@trial
def tight(world):
    """Three requests in a cache that holds less than all of them."""
    prompts = [world.prompt(i, length) for i, length in enumerate((80, 60, 100, 70))]
    return world.together(3, prompts, n_cells=N_TRAINED, drafter=world.drafter, draft_max=N_DRAFT)


@trial
def states(world):
    """A state is saved, another text generated, the state restored and continued."""
    with closing(world.opened(drafter=world.drafter, draft_max=N_DRAFT)) as llm:
        prompt, other = world.prompts(2)
        before = [record.token for record in world.run(llm, prompt)]
        state = llm.save_state()
        world.run(llm, other)
        llm.load_state(state)
        n_kept = state.n_tokens
        continued = (prompt + before)[: n_kept + 1]
        return world.worst([(continued, world.run(llm, continued))])


@trial
def prefix(world):
    """Texts that begin alike, with a shorter one and an equal one among them."""
    with closing(world.opened(drafter=world.drafter, draft_max=N_DRAFT)) as llm:
        first = world.prompt(1, 50)
        texts = [first, first[:30] + world.prompt(2, 12), first[:8], first, first]
        return world.worst([(text, world.run(llm, text)) for text in texts])


@trial
def edge(world):
    """Up to the end of the trained length: it ends with an error that says so."""
    with closing(world.opened(drafter=world.drafter, draft_max=N_DRAFT)) as llm:
        prompt = world.prompt(3, N_TRAINED - 20)
        try:
            world.run(llm, prompt, 40)
            raise AssertionError("more tokens than the context holds")
        except ContextFullError:
            return world.worst([(prompt, list(llm.records))])


@trial
def bits(world):
    """With Q8_0 weights, F16 caches and our kernels: the tokens and the bits of plain decoding, behind rejections and
    among other requests. Fails, too, where pyfly-cpp says that a batch may change them, with what it says."""
    _native.enable_kernels()
    everything = kernels.KernelVerdict(tuple(_native.kernel_types()), True, "every type")
    verdict, kernels.verdict = kernels.verdict, lambda: everything
    path = f"{world.path}.q8_0.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    options = {**DEFAULTS, "type_k": None, "type_v": None, "flash_attn": None}
    prompts = world.prompts(4)
    try:
        if llama_cpp.llama_model_quantize(world.path.encode(), path.encode(), params) != 0:
            raise RuntimeError("llama.cpp does not quantise it")
        said = []

        def alone(**drafting):
            with closing(FlyLlama(path, **options, **drafting)) as llm:
                said.extend(exactness.reasons(llm.ctx))
                return [_bits(world.run(llm, prompt)) for prompt in prompts]

        plain = alone()
        texts = [prompt + [token for token, _ in own] for prompt, own in zip(prompts, plain)]
        drafting = {"drafter": _known(texts), "draft_max": N_DRAFT}
        off = float(alone(**drafting) != plain)
        with FlyBatch(path, 4, **options, **drafting) as batch:
            said.extend(exactness.reasons(batch._llama.ctx))
            handles = [batch.submit(prompt, max_tokens=N_NEW, temperature=0.0) for prompt in prompts]
            for handle in handles:
                handle.result()
            off = max(off, float([_bits(handle.records) for handle in handles] != plain))
    finally:
        kernels.verdict = verdict
        Path(path).unlink(missing_ok=True)
    if said:
        raise RuntimeError(f"{'not ' if off == 0.0 else ''}changed by a batch: {'; '.join(dict.fromkeys(said))}")
    return {"gap": off, "logprob": 0.0}


def _known(texts):
    """A drafter that continues these texts, with a wrong token at every depth in turn."""
    n_calls = itertools.count()

    def draft(history):
        text = [int(token) for token in history]
        rest = next((known[len(text) :] for known in texts if known[: len(text)] == text), [])[:N_DRAFT]
        depth = next(n_calls) % (N_DRAFT + 1)
        if depth < len(rest):
            rest[depth] = rest[depth] % 100 + 1
        return rest

    return draft


def _bits(records):
    return [(record.token, record.logprob) for record in records]


@trial
def mtp(world):
    """The model's own MTP blocks as drafter."""
    return world.alone(drafter=MTP(), draft_max=1)


@trial
def mtp_batch(world):
    """The same with three requests."""
    return world.together(3, drafter=MTP(), draft_max=1)


def main(path, names):
    world = World(path)
    for name in names:
        print(json.dumps({"begins": name}), flush=True)
        try:
            outcome = TRIALS[name](world)
            outcome["tolerance"] = world.tolerance(name, max(outcome["gap"], outcome["logprob"]))
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"trial": name, **outcome}), flush=True)


if __name__ == "__main__":
    main(str(Path(sys.argv[1])), sys.argv[2:] or [name for name in TRIALS if not name.startswith("mtp")])
