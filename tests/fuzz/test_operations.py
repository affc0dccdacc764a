"""Random operations on one object, checked against a fresh evaluation of what it says it holds.

Prompts that share beginnings or do not fit, generations that are suspended, closed, dropped, superseded and sent
tokens, states that are saved and loaded in mid-generation, drafters that are swapped, contexts that fill up.
After every step, `n_tokens`, `input_ids` and the memory agree, and every token that was given out is the most probable
one after the tokens before it (teacher forcing)."""

from __future__ import annotations

import gc

import llama_cpp
import numpy as np
import pytest

from pyfly_cpp import BusyError, ContextFullError, DraftModel, Exact, FlyLlama, PromptLookup, Window

pytestmark = pytest.mark.fuzz

F32 = llama_cpp.GGML_TYPE_F32
N_CTX = 200  # llama.cpp makes it 256


class Judge:
    """Evaluates a text from nothing."""

    def __init__(self, path, tolerance):
        self.tolerance = tolerance
        self.llama = llama_cpp.Llama(
            path, n_ctx=512, n_threads=1, n_threads_batch=1, type_k=F32, type_v=F32, logits_all=True, verbose=False
        )

    def check(self, context, tokens):
        self.llama.reset()
        self.llama._ctx.kv_cache_clear()
        self.llama.eval([*context, *tokens][:-1])
        for i, token in enumerate(tokens):
            row = self.llama.scores[len(context) - 1 + i]
            assert row.max() - row[token] <= self.tolerance, f"token {i} of {tokens} behind {context}"


class Session:
    """One FlyLlama, what it should hold, and a random user."""

    def __init__(self, path, drafters, judge, seed):
        self.rng = np.random.default_rng(seed)
        self.drafters, self.judge = drafters, judge
        self.llm = FlyLlama(
            path, n_ctx=N_CTX, n_batch=int(self.rng.choice([16, 64, 512])), n_threads=1, n_threads_batch=1,
            type_k=F32, type_v=F32, verbose=False, drafter=self.pick(drafters),
        )  # fmt: skip
        self.generations = []  # [generator, text so far, is it the current one]
        self.states = []
        self.texts = [self.tokens(8)]

    def pick(self, choices):
        return choices[int(self.rng.integers(len(choices)))]

    def tokens(self, n):
        return self.rng.integers(300, 340 if self.rng.random() < 0.5 else 1500, size=n).tolist()

    def supersede(self):
        for generation in self.generations:
            generation[2] = False

    def prompt(self):
        known = list(self.pick(self.texts))
        return known[: int(self.rng.integers(0, len(known) + 1))] + self.tokens(int(self.rng.integers(1, 30)))

    # ---- What a user may do

    def start(self):
        prompt = self.prompt()
        if self.rng.random() < 0.1:
            prompt += self.pick([[-1], [10**7], self.tokens(300)])
        before = list(self.llm.eval_tokens)
        generator = self.llm.generate(prompt, temp=0.0)
        try:
            first = next(generator)
        except (ContextFullError, ValueError):
            assert list(self.llm.eval_tokens) == before
            if len(prompt) <= 256:
                assert prompt[-1] in (-1, 10**7)
                self.supersede()
            return
        self.supersede()
        self.judge.check(prompt, [first])
        self.generations = [*self.generations[-2:], [generator, [*prompt, first], True]]

    def go_on(self):
        if not self.generations:
            return
        generation = self.pick(self.generations)
        generator, text, is_current = generation
        found, n = [], int(self.rng.integers(1, 12))
        try:
            for _ in range(n):
                found.append(next(generator))
        except BusyError:
            assert not is_current
            self.generations.remove(generation)
            return
        except ContextFullError:
            assert is_current and len(text) + len(found) == 257
            self.generations.remove(generation)
        except StopIteration:
            assert not is_current
            self.generations.remove(generation)
            return
        assert is_current
        if found:
            self.judge.check(text, found)
        text += found
        self.texts = [*self.texts[-4:], list(text)]

    def send(self):
        if not self.generations:
            return
        generation = self.pick(self.generations)
        generator, text, is_current = generation
        sent = self.tokens(int(self.rng.integers(1, 20)))
        if self.rng.random() < 0.15:
            sent += self.pick([[-1], self.tokens(300)])
        try:
            token = generator.send(sent)
        except (BusyError, StopIteration):
            assert not is_current
            self.generations.remove(generation)
            return
        except (ContextFullError, ValueError):
            assert is_current and (sent[-1] == -1 or len(text) + len(sent) > 256)
            self.generations.remove(generation)
            return
        assert is_current
        text += sent
        self.judge.check(text, [token])
        text.append(token)

    def stop(self):
        if self.generations:
            generation = self.pick(self.generations)
            self.generations.remove(generation)
            if self.rng.random() < 0.5:
                generation[0].close()
            del generation
            gc.collect()

    def save(self):
        state = self.llm.save_state()
        held = list(self.llm.eval_tokens)
        assert state.n_tokens == len(held)
        self.states = [*self.states[-2:], (state, held)]

    def load(self):
        if self.states:
            state, held = self.pick(self.states)
            self.llm.load_state(state)
            self.supersede()
            assert list(self.llm.eval_tokens) == held

    def swap(self):
        self.llm.drafter = self.pick(self.drafters)
        self.supersede()

    def evaluate(self):
        tokens = self.tokens(int(self.rng.integers(1, 8)))
        held = list(self.llm.eval_tokens)
        if len(held) + len(tokens) <= 256:
            self.llm.eval(tokens)
            self.supersede()
            assert list(self.llm.eval_tokens) == [*held, *tokens]
            token = self.llm.sample(temp=0.0)
            self.judge.check([*held, *tokens], [token])

    def complete(self):
        prompt = self.prompt()[:200]
        n = int(self.rng.integers(1, 20))
        out = []
        stop = llama_cpp.StoppingCriteriaList([lambda ids, row: out.append(list(ids)) or False])
        self.llm.create_completion(prompt, max_tokens=n, temperature=0.0, stopping_criteria=stop)
        self.supersede()
        text = list(self.llm.eval_tokens)
        if len(text) > len(prompt):
            self.judge.check(prompt, text[len(prompt) :])

    def settings(self):
        self.llm.window = self.pick([Window(2), Window(6), Window(3, rule="reconverge")])
        self.llm.draft_max = self.pick([None, 0, 1, 3, 9])
        self.llm.trace = bool(self.rng.random() < 0.3)
        self.llm.adaptive = bool(self.rng.random() < 0.3)

    def step(self):
        operations = [self.start] * 3 + [self.go_on] * 6 + [self.send, self.stop, self.save, self.load, self.swap,
                      self.evaluate, self.complete, self.settings]  # fmt: skip
        self.pick(operations)()
        llm = self.llm
        held = list(llm.eval_tokens)
        assert 0 <= llm.n_tokens == len(held) <= 256
        current = [text for _, text, is_current in self.generations if is_current]
        if current:
            assert held == current[0][:-1]
        else:
            memory = llama_cpp.llama_get_memory(llm.ctx)
            assert llama_cpp.llama_memory_seq_pos_max(memory, 0) >= llm.n_tokens - 1


def run(path, drafters, judge, seed):
    session = Session(path, drafters, judge, seed)
    try:
        for _ in range(30):
            session.step()
    finally:
        session.llm.close()


def test_on_an_attention_model(cases, tiny_target_f32, tiny_draft):
    judge = Judge(tiny_target_f32, 1e-3)
    drafters = [None, PromptLookup(), DraftModel(tiny_draft, draft_max=5), [PromptLookup(), DraftModel(tiny_draft)],
                lambda tokens: tokens[-3:]]  # fmt: skip
    for seed in cases(14):
        run(tiny_target_f32, drafters, judge, seed)


def test_on_a_hybrid_model(cases, tiny_qwen35):
    """With a recurrent state, which goes back in snapshots and checkpoints."""
    judge = Judge(tiny_qwen35, 2e-2)
    drafters = [None, PromptLookup(), lambda tokens: tokens[-3:]]
    for seed in cases(8):
        run(tiny_qwen35, drafters, judge, seed)


def test_gates_do_not_matter_to_what_is_held(cases, tiny_target_f32):
    """Loose verification: the text is another, the bookkeeping the same."""
    from pyfly_cpp import Margin

    class Nothing:
        def check(self, context, tokens):
            pass

    for seed in cases(8):
        session = Session(tiny_target_f32, [PromptLookup(), lambda tokens: tokens[-5:]], Nothing(), seed)
        session.llm.gate = Margin(3.0) if seed % 3 else Exact()
        session.llm.window = Window(3, rule="reconverge")
        for _ in range(40):
            session.step()
        session.llm.close()
