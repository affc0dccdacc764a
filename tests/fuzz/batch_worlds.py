"""The worlds of `test_batches.py`: from a seed, a scripted target, its drafters, and requests that join, leave, fail
and are cancelled. Each one is held against itself alone in a batch of one."""

from __future__ import annotations

import collections
import contextlib
import random

import numpy as np
from llama_cpp._internals import LlamaSampler

from pyfly_cpp import ContextFullError, Entropy, Exact, Fuzzy, Margin, PromptLookup, Stochastic, Window
from pyfly_cpp._native import LOOKUP_MATCHES, Batch, CallbackDrafter, RowDrafter, ScriptedTarget
from pyfly_cpp.decoding.gates import AllOf, AnyOf, ExactFirst, NoRepeat, Relaxed, Typical
from pyfly_cpp.decoding.gates.fuzzy import KINDS

N_VOCAB, EOG, PROTECTED, BROKEN = 9, 0, 1, 99


class MineError(Exception):
    """What callbacks of the worlds raise."""


class Model:
    """Rows and drafts that are functions of the last few tokens, but for the requests that are told to fail."""

    def __init__(self, rng):
        self.seed, self.agreement = rng.randrange(2**31), rng.choice([0.2, 0.5, 0.8, 1.0])
        self.eog_bias = rng.choice([-9.0, -9.0, -1.0])
        self.rows, self.drafts, self.broken_rows, self.broken_drafts = {}, {}, [], []

    def row(self, history):
        for prompt, n, how in self.broken_rows:
            if len(history) >= n and tuple(history[: len(prompt)]) == prompt:
                if how == "raises":
                    raise MineError("row")
                return np.full(N_VOCAB, np.nan, dtype=np.float32)
        return self.true_row(tuple(history[-3:].tolist()))

    def true_row(self, key):
        row = self.rows.get(key)
        if row is None:
            row = np.random.default_rng([self.seed, *key]).normal(size=N_VOCAB).astype(np.float32)
            row[EOG] += self.eog_bias
            self.rows[key] = row
        return row

    def draft(self, history):
        for prompt, n, proposal in self.broken_drafts:
            if len(history) >= n and tuple(history[: len(prompt)]) == prompt:
                if proposal is None:
                    raise MineError("draft")
                return proposal
        key = tuple(history[-4:].tolist())
        if key not in self.drafts:
            rng, text = random.Random(repr((self.seed, key))), list(key)
            for _ in range(rng.choice([0, 1, 3, 10])):
                order = np.argsort(-self.true_row(tuple(text[-3:]))).tolist()
                u = rng.random()
                text.append(order[0] if u < self.agreement else order[1] if u < 0.9 else rng.randrange(N_VOCAB))
            self.drafts[key] = text[len(key) :]
        return self.drafts[key]

    def draft_row(self, history):
        row = self.true_row(tuple(history[-3:].tolist()))
        return row + 0.5 * np.roll(row, 1)

    def draft_and_rows(self, history):
        tokens, text, rows = self.draft(history), history.tolist(), []
        for token in tokens:
            rows.append(self.draft_row(np.array(text)))
            text.append(token % N_VOCAB)
        return tokens, np.array(rows, dtype=np.float32).reshape(-1, N_VOCAB)


class Request:
    """One request: its prompt, how it is decoded, and what happens to it after so many committed tokens."""

    def __init__(self, rng, world):
        stem = rng.choice(world.stems)
        own = [rng.randrange(2, N_VOCAB) for _ in range(rng.choice([1, 2, 5, 30]))]
        self.prompt = [*stem[: rng.randrange(len(stem) + 1)], *own][: world.n_ctx]
        gates = [Margin(rng.choice([0.0, 0.3, 1.0, 5.0])), Entropy(rng.choice([0.3, 0.9]), top=rng.choice([3, None]))]
        self.gate = rng.choice([Exact(), *gates, AllOf(*gates), AnyOf(*gates)])
        other = random.Random(str(self.prompt))  # apart from what the seeds of found bugs draw
        if other.random() < 0.4:
            guarded = AllOf(self.gate, ExactFirst(other.randrange(30)))
            self.gate = other.choice([Typical(0.3, 0.5), Relaxed(4, 0.5), guarded])
        size, rule = rng.randrange(9), rng.choice(["agree", "reconverge"])
        tail, across = rng.choice([None, None, rng.randrange(6)]), rng.choice([None, True, False])
        self.window = Window(size, rule, tail, None if rule == "agree" else across)
        if world.is_adaptive:
            self.gate = Exact()  # what is drafted depends on time; what an exact text commits does not
        self.n_wanted = rng.choice([1, 5, 20, 40, 10**6]) if rng.random() < 0.5 else rng.randrange(1, 60)
        lengths = [min(rng.choice([0, 1, 3, 10]), world.n_batch - 1) for _ in world.drafters]
        self.draft_max = rng.choice([None, lengths])
        if world.has_rows and self.draft_max is None and not world.is_adaptive and other.random() < 0.3:
            self.gate = Fuzzy(other.choice(KINDS), other.choice([0.02, 0.1, 0.5]), other.choice([None, 3]))
        self.sampler_seed = rng.randrange(2**31) if rng.random() < 0.3 else None
        if not world.is_adaptive and other.random() < (0.4 if self.sampler_seed is not None else 0.1):
            residual = (
                [Fuzzy(other.choice(KINDS), 0.1, residual=True)] if world.draws and self.draft_max is None else []
            )
            self.gate, self.window = other.choice([Stochastic(), *residual]), Window(0)
        elif not world.is_adaptive and not self.gate.is_lossless and other.random() < 0.2:
            self.gate = AllOf(self.gate, NoRepeat(other.randrange(1, 6)))
        self.penalty = rng.choice([1.0, 1.3])
        self.options = {
            "trace": rng.random() < 0.3,
            "keep_rows": rng.random() < 0.3,
            "resumable": rng.random() < 0.3,
            "all_rows": rng.random() < 0.2,
            "owner": other.randrange(2),
        }
        # after so many committed tokens, behind which of the last step's, and what is sent there
        self.resumes = [
            (rng.randrange(1, 30), rng.randrange(10), [rng.randrange(2, N_VOCAB) for _ in range(rng.randrange(4))])
            for _ in range(rng.randrange(3) if self.options["resumable"] else 0)
        ]

    def sampler(self):
        if self.sampler_seed is None:
            return None
        sampler = LlamaSampler()
        sampler.add_penalties(N_VOCAB, 8, self.penalty, 0.0, 0.0)
        sampler.add_min_p(0.05)
        sampler.add_temp(0.8)
        sampler.add_dist(self.sampler_seed)
        return sampler


class Run:
    """A request in a slot: follows what is committed there and checks it on the way."""

    def __init__(self, world, request, slot):
        self.world, self.request, self.slot = world, request, slot
        self.text, self.records, self.rows, self.error = list(request.prompt), [], [], None
        self.resumes, self.is_done, self.prompt_rows = list(request.resumes), False, set()
        slot.reset_counters()
        slot.begin(
            request.prompt, request.gate.nodes(), request.window.config(), sampler=request.sampler(),
            n_evaluated=0 if request.options["all_rows"] else None, draft_max=request.draft_max, **request.options,
        )  # fmt: skip
        slot.want(request.n_wanted)

    def after_step(self, progress):
        request, slot = self.request, self.slot
        tokens = slot.tokens()
        assert len(tokens) == progress.n_records
        records = [slot.record(i) for i in range(len(tokens))]
        for i, (position, token) in enumerate(tokens):
            assert position == len(self.text) == records[i].position, "positions never go back, nor leave one out"
            self.text.append(token)
            if request.options["keep_rows"]:
                row = slot.record_row(i, N_VOCAB)
                assert row is not None
                self.rows.append(row.tobytes())
        if request.options["all_rows"] and tokens and not self.records:
            assert self.prompt_rows >= set(range(len(request.prompt) - 1)), "every row of the prompt"
        # NaN, where nothing was measured, is not equal to itself
        self.records += [tuple(None if x != x else x for x in record) for record in records]
        history = slot.history()
        assert history[: len(self.text)].tolist() == self.text
        assert slot.n_evaluated <= len(history) - (progress.failure is None)
        if progress.failure is not None:
            assert not tokens or isinstance(progress.failure, ContextFullError)
            self.error, self.is_done = progress.failure, True
        elif len(self.records) >= request.n_wanted or any(token == EOG for _, token in tokens):
            self.is_done = True
        elif tokens and self.resumes and len(self.records) >= self.resumes[0][0]:
            _, which, sent = self.resumes.pop(0)
            n_keep = tokens[which % len(tokens)][0] + 1
            if n_keep + len(sent) > self.world.n_ctx:
                return
            del self.records[len(self.records) - (tokens[-1][0] + 1 - n_keep) :]
            slot.resume(n_keep, sent)
            self.text = [*self.text[:n_keep], *sent]

    def check_prompt_rows(self, n_before):
        """Rows of what the last step evaluated, and no others."""
        slot, n = self.slot, len(self.slot.history())
        if not self.request.options["all_rows"] or self.error is not None:
            return
        for position in range(n):
            row = slot.prompt_row(position, N_VOCAB)
            if row is not None:
                assert n_before <= position < slot.n_evaluated
                assert row.tobytes() == self.world.model.row(slot.history()[: position + 1]).tobytes()
                self.prompt_rows.add(position)

    def outcome(self):
        """What must be as it is alone. Two callbacks that raise in one step cannot be told apart."""
        counters = self.slot.counters()
        names = ("steps", "drafted", "committed", "matched", "loose_accepted", "rejected_gate", "rejected_window",
                 "rejected_boundary", "rejected_safety", "rollbacks", "rolled_back", "drafted_at_depth",
                 "accepted_at_depth", "accepted_by")  # fmt: skip
        error = type(self.error).__name__ if self.error is not None else None
        return {
            "error": {"PyflyError": "MineError"}.get(error, error),
            "text": self.text,
            "records": self.records,
            "rows": self.rows,
            **{name: counters[name] for name in names},
        }


class World:
    """A target and what runs on it, all from a seed."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.n_slots = rng.choice([2, 3, 4, 8, 16])
        self.n_ctx = rng.choice([60, 150, 400])
        self.n_batch = rng.choice([4, 8, 16, 64])
        self.n_chunk = rng.choice([0, 1, 3, 8, 64])
        self.us_chunk = random.Random(f"chunk {seed}").choice([0, 0, 1, 100])
        most = self.n_ctx * self.n_slots
        self.n_cells = rng.choice([most, most, self.n_ctx, self.n_ctx * 3 // 2, self.n_ctx * 2 // 3])
        self.recurrent = (rng.choice([0, 2, 5]), rng.random() < 0.7) if rng.random() < 0.5 else None
        self.is_adaptive = rng.random() < 0.15
        self.draft_max = min(rng.choice([0, 1, 3, 10]), self.n_batch - 1)
        self.stems = [[rng.randrange(2, N_VOCAB) for _ in range(rng.choice([0, 20, 70]))] for _ in range(3)]
        self.model = Model(rng)
        kinds = rng.choice([[], ["callback"], ["lookup"], ["lookup", "callback"], ["callback", "lookup"]])
        self.drafters = [
            # A memory changes steps, and no answer.
            PromptLookup(3, 8, rng.choice(tuple(LOOKUP_MATCHES)), memory=1000 if self.is_adaptive else 0).open()
            if kind == "lookup"
            else CallbackDrafter(self.model.draft_and_rows, N_VOCAB)
            for kind in kinds
        ]
        self.has_rows = "callback" in kinds and self.draft_max > 0
        self.draws = self.has_rows and random.Random(str(seed)).random() < 0.5
        if self.draws:
            rows = RowDrafter(self.model.draft_row, N_VOCAB)
            self.drafters = [rows if isinstance(d, CallbackDrafter) else d for d in self.drafters]
        self.requests = [Request(rng, self) for _ in range(rng.randrange(2, 5 * self.n_slots // 2 + 2))]
        for request in self.requests:
            n, u = len(request.prompt) + rng.randrange(30), rng.random()
            if u < 0.06:
                self.model.broken_rows.append((tuple(request.prompt), n, rng.choice(["raises", "nan"])))
            elif u < 0.12:
                self.model.broken_drafts.append((tuple(request.prompt), n, rng.choice([None, [BROKEN], [2, -1]])))

    @contextlib.contextmanager
    def batch(self, n_slots):
        target = ScriptedTarget(
            self.model.row, N_VOCAB, self.n_ctx, self.n_batch, n_sequences=n_slots, n_cells=self.n_cells,
            recurrent=self.recurrent,
        )  # fmt: skip
        with target, Batch(target) as batch:
            target.protect([PROTECTED], [EOG])
            batch.configure(
                [(drafter, self.draft_max) for drafter in self.drafters],
                adaptive=self.is_adaptive,
                n_chunk=self.n_chunk,
                us_chunk=self.us_chunk,
            )
            yield batch

    def alone(self, request):
        """The outcome of a request in a batch of one."""
        with self.batch(1) as batch:
            run = Run(self, request, batch.slots[0])
            n_iterations = 0
            while not run.is_done:
                n_before = run.slot.n_evaluated
                (progress,) = batch.step()
                assert not progress.is_waiting
                run.check_prompt_rows(n_before)
                run.after_step(progress)
                n_iterations += 1
                assert n_iterations < 4000, "starved"
            return run.outcome()

    def run(self):
        """All requests at once. Returns how many steps of requests there were."""
        rng = self.rng
        waiting, running = collections.deque(self.requests), []  # running: the oldest first
        n_steps = n_iterations = 0
        with self.batch(self.n_slots) as batch:

            def leave(run, is_cancelled):
                found, request = run.outcome(), run.request
                n = len(run.text)
                with contextlib.suppress(ContextFullError, MineError):  # it may be evaluated to keep so much
                    run.slot.end(rng.choice([-1, -1, -1, 0, n - 1, rng.randrange(n)]))
                assert run.slot.n_evaluated <= n
                expected = self.alone(request)
                if self.is_adaptive:  # other drafts, other steps
                    if found["error"] is None and expected["error"] is None and not request.resumes:
                        m = min(n, len(expected["text"]))
                        assert found["text"][:m] == expected["text"][:m]
                elif not is_cancelled:
                    for key in expected:
                        assert found[key] == expected[key], (key, found[key], expected[key])
                elif not request.resumes:  # else it may have gone on somewhere else since
                    assert found["records"] == expected["records"][: len(found["records"])]
                    assert found["rows"] == expected["rows"][: len(found["rows"])]
                    assert found["committed"] == len(found["records"])

            while waiting or running:
                while waiting and rng.random() < (0.4 if running else 1.0):
                    request = waiting[0]
                    slot = batch.find_slot(request.prompt, request.options["owner"])
                    if rng.random() < 0.05 and running:  # in the place of another, which is forgotten
                        run = running.pop(rng.randrange(len(running)))
                        n_steps += run.slot.counters()["steps"]
                        slot = run.slot
                    if slot is None:
                        break
                    running.append(Run(self, waiting.popleft(), slot))
                if running and rng.random() < 0.02:
                    run = running.pop(rng.randrange(len(running)))
                    n_steps += run.slot.counters()["steps"]
                    leave(run, True)
                if not running:
                    continue
                if rng.random() < 0.01:
                    run, n_keep = rng.choice(running), rng.randrange(len(self.stems[0]) + 3)
                    if n_keep < len(run.text) and not run.request.options["all_rows"]:  # it evaluates without rows
                        with contextlib.suppress(ContextFullError):
                            run.slot.park(n_keep)
                before = [run.slot.n_evaluated for run in running]
                all_progress = batch.step()
                assert [p.slot for p in all_progress] == [run.slot.number for run in running], "the oldest first"
                is_waiting = [p.is_waiting for p in all_progress if p.failure is None]
                assert is_waiting == sorted(is_waiting), "younger ones wait"
                assert not all_progress[0].is_waiting, "the oldest never waits"
                for run, n_before in zip(running, before):
                    run.check_prompt_rows(n_before)
                for run, progress in zip(list(running), all_progress):
                    run.after_step(progress)
                    if run.is_done:
                        running.remove(run)
                        n_steps += run.slot.counters()["steps"]
                        leave(run, False)
                n_iterations += 1
                assert n_iterations < 400 * len(self.requests) + 4000, "starved"
        return n_steps
