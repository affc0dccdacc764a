"""One object through its life: refused prompts, tokens that are sent, states, several threads, the end.

Whatever happens, what it says it holds is what it holds, and the next answer is right."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import llama_cpp
import numpy as np
import pytest
from heads import PROMPT, SHORT, answer, at_once, right_answers
from llama_cpp import LogitsProcessorList

from pyfly_cpp import BusyError, ContextFullError, DraftModel, FlyBatch, FlyLlama, PromptLookup
from pyfly_cpp._native import batch as native_batch
from pyfly_cpp.cli import in_options
from pyfly_cpp.engine.access import Access
from pyfly_cpp.machine import memory

F32 = llama_cpp.GGML_TYPE_F32
OPTIONS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "type_k": F32, "type_v": F32, "verbose": False}


@pytest.fixture(scope="module")
def target(tiny_target_f32):
    return tiny_target_f32


@pytest.fixture(scope="module")
def expected(target):
    return right_answers(target, OPTIONS)


@pytest.fixture
def interrupt_in():
    """interrupt_in(seconds): a KeyboardInterrupt comes then; 0: none comes any more."""
    if not hasattr(signal, "setitimer"):
        pytest.skip("a system without timers")

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def in_child(code, *arguments):
    """Runs code that may crash, with an allocator that shows what is used after it was freed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONMALLOC": "debug"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


# ---- The length of the context ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits_all", [False, True])
@pytest.mark.parametrize("n_ctx", [300, 100])
def test_a_context_that_llama_cpp_rounds_up(n_ctx, logits_all, target):
    """Every position that llama.cpp holds can be used, and a prompt that does not fit changes nothing."""
    fly = FlyLlama(
        target, adaptive=False, **{**OPTIONS, "n_ctx": n_ctx, "logits_all": logits_all}, drafter=PromptLookup()
    )
    holds = fly.n_ctx()
    assert holds == 256 * math.ceil(n_ctx / 256)
    roomy = FlyLlama(target, **{**OPTIONS, "n_ctx": 1024})
    rng = np.random.default_rng(n_ctx)
    first = fly.tokenize(SHORT.encode())
    for n in (30, n_ctx + 6 if n_ctx + 6 < holds else holds - 6, holds + 1, 40, holds):
        prompt = [*first, *rng.integers(300, 1000, size=n - len(first)).tolist()]
        if n > holds:
            with pytest.raises(ContextFullError, match=f"the context holds {holds}"):
                next(fly.generate(prompt, temp=0.0))
            continue
        found = [t for _, t in zip(range(min(6, holds - n + 1)), fly.generate(prompt, temp=0.0))]
        assert found == [t for _, t in zip(range(len(found)), roomy.generate(prompt, temp=0.0))]
        gc.collect()
        assert list(fly.eval_tokens) == [*prompt, *found][: fly.n_tokens]


def test_a_state_that_does_not_fit(target, expected):
    big = FlyLlama(target, **{**OPTIONS, "n_ctx": 1024})
    next(big.generate(list(range(300, 800)), temp=0.0))
    state = big.save_state()
    for options in ({}, {"logits_all": True}):
        fly = FlyLlama(target, drafter=PromptLookup(), adaptive=False, **OPTIONS, **options)
        before = answer(fly), list(fly.eval_tokens)
        with pytest.raises(ValueError, match=r"holds 500 tokens and the context 256; raise n_ctx"):
            fly.load_state(state)
        assert before == (expected[PROMPT], list(fly.eval_tokens))
        longer = PROMPT + before[0][0]["text"]
        assert answer(fly, longer, 20) == answer(big, longer, 20)


def test_steps_that_are_interrupted_do_not_count(target, interrupt_in):
    """Whenever a request is interrupted, each step that counts has its token: without drafts, one."""
    n_interrupted = 0
    with FlyLlama(target, **OPTIONS) as fly:
        for milliseconds in range(2, 60, 2):
            fly.reset_stats()
            try:
                interrupt_in(milliseconds / 1000)
                fly(PROMPT, max_tokens=150, temperature=0)
                interrupt_in(0)
            except KeyboardInterrupt:
                n_interrupted += 1
            assert fly.stats.rounds == fly.stats.committed
    assert n_interrupted > 5


@pytest.mark.parametrize("kind", ["tiny_target_f32", "tiny_qwen35"])
def test_ctrl_c_does_not_wait_for_a_long_batch(kind, request, interrupt_in):
    """Nothing of the batch is held then, and the next request is right."""
    options = {**OPTIONS, "n_ctx": 3072, "n_batch": 3072, "n_ubatch": 3072}
    prompt = np.random.default_rng(3).integers(300, 1000, size=3000).tolist()
    with FlyLlama(request.getfixturevalue(kind), **options) as fly:
        began = time.process_time()
        right = next(fly.generate(prompt[:1500], temp=0.0))
        of_half = time.process_time() - began
        fly.reset()
        began = time.process_time()
        with pytest.raises(KeyboardInterrupt):
            interrupt_in(0.02)
            next(fly.generate(prompt, temp=0.0))
        assert time.process_time() - began < of_half
        assert llama_cpp.llama_memory_seq_pos_max(fly._ctx.memory, 0) == -1
        assert next(fly.generate(prompt[:1500], temp=0.0)) == right


# ---- Samplers that Python wrote --------------------------------------------------------------------------------------


def test_a_processor_outlives_the_request_that_failed(target):
    """What the engine still holds of a request calls back into its sampler until another takes its place."""
    code = """
        import sys, gc
        import numpy as np
        from llama_cpp import LogitsProcessorList
        from pyfly_cpp import FlyLlama, PromptLookup

        gc.set_threshold(1)  # samplers are parts of cycles
        llm = FlyLlama(sys.argv[1], n_ctx=300, n_threads=1, n_threads_batch=1, verbose=False, drafter=PromptLookup())
        def bias(ids, scores):
            scores = np.array(scores)
            scores[5] += 1.0
            return scores
        processors = LogitsProcessorList([bias])
        prompt = llm.tokenize(b"Tom has 3 apples and 4 pears.")
        llm.set_seed(5)
        first = [t for _, t in zip(range(20), llm.generate(prompt, temp=0.7, logits_processor=processors))]
        for bad in ([-1], [10**6], [7] * 600):
            generator = llm.generate(prompt, temp=0.7, logits_processor=processors)
            next(generator)
            try:
                generator.send(bad)
                raise SystemExit(f"{bad[:3]} was taken")
            except ValueError as error:
                pass
            del generator
            gc.collect()
            for refused in ([-1], [7] * 600):
                try:
                    next(llm.generate(refused, temp=0.7, logits_processor=LogitsProcessorList([bias])))
                    raise SystemExit(f"{refused[:3]} was taken")
                except ValueError:
                    pass
            gc.collect()
            try:
                next(llm.generate([7] * 306, temp=0.7, logits_processor=LogitsProcessorList([bias])))
            except ValueError:  # it did not fit when the context was taken for 300 tokens
                gc.collect()
            llm(prompt, max_tokens=5, logit_bias={7: 3.0})
        llm.set_seed(5)
        again = [t for _, t in zip(range(20), llm.generate(prompt, temp=0.7, logits_processor=processors))]
        assert again == first, (again, first)
        gc.set_threshold(0)  # a collection that is due while CPython 3.12 ends crashes it
        print("fine")
    """
    assert in_child(code, target) == "fine\n"


# ---- Tokens that are sent --------------------------------------------------------------------------------------------

SAMPLINGS = [
    {"temp": 0.9},
    {"temp": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temp": 0.8, "repeat_penalty": 1.4},
    {"temp": 1.0, "mirostat_mode": 2, "mirostat_tau": 4.0},
    {"temp": 1.0, "mirostat_mode": 1},
    {"temp": 0.0, "frequency_penalty": 0.5},
]


@pytest.mark.alike
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: " ".join(f"{k}={v}" for k, v in s.items()))
def test_a_send_does_not_start_the_random_numbers_again(sampling, target, tiny_draft):
    """One sampler from the first token to the last: what the base class's own chain draws when it is kept."""
    sent = [300, 301, 302]
    base = llama_cpp.Llama(target, seed=11, **OPTIONS)
    base._sampler = base._init_sampler(**sampling)
    prompt = base.tokenize(PROMPT.encode())
    expected, inserted = [], prompt
    for n in (9, 4, 7):
        for _ in range(n):
            base.eval(inserted)
            expected.append(base.sample())
            inserted = expected[-1:]
        inserted = [expected[-1], *sent]
    for drafter in (None, PromptLookup(), DraftModel(tiny_draft, draft_max=5)):
        fly = FlyLlama(target, seed=11, drafter=drafter, adaptive=False, **OPTIONS)
        generator = fly.generate(prompt, **sampling)
        found = [next(generator) for _ in range(9)]
        for n in (4, 7):
            found += [generator.send(sent)] + [next(generator) for _ in range(n - 1)]
        assert found == expected


def test_tokens_sent_at_a_full_context(target, expected):
    fly = FlyLlama(target, drafter=PromptLookup(), adaptive=False, **OPTIONS)
    prompt = list(range(300, 540))
    for n, sent in ((17, [5]), (16, [5, 6]), (1, [5] * 16)):
        generator = fly.generate(prompt, temp=0.0)
        for _ in range(n):
            next(generator)
        with pytest.raises(ContextFullError, match="raise n_ctx"):
            generator.send(sent)
        assert answer(fly) == expected[PROMPT]
    generator = fly.generate(prompt, temp=0.0)
    next(generator)
    assert isinstance(generator.send([5] * 15), int)  # just fits


def test_embeddings_of_a_model_without_them_change_nothing(target):
    fly = FlyLlama(target, **OPTIONS)
    generator = fly.generate([300, 301], temp=0.0)
    first = next(generator)
    with pytest.raises(RuntimeError, match="embedding=True"):
        fly.embed("A")
    assert isinstance(next(generator), int) and list(fly.eval_tokens) == [300, 301, first]


def test_tokens_sent_after_a_reset(target):
    fly = FlyLlama(target, **OPTIONS)
    generator = fly.generate([300, 301], temp=0.0)
    next(generator)
    fly.reset()
    with pytest.raises(BusyError, match="state was changed"):
        generator.send([5])


# ---- Numbers that the base class takes -------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [2**31, 2**40, math.inf, 3.0, 2.5, 1, -7, None, 0.0, math.nan, True])
def test_max_tokens_of_any_kind(max_tokens, target):
    base, fly = llama_cpp.Llama(target, **OPTIONS), FlyLlama(target, drafter=PromptLookup(), adaptive=False, **OPTIONS)
    results = [llm(PROMPT, max_tokens=max_tokens, temperature=0)["choices"] for llm in (base, fly)]
    assert results[0] == results[1]


def test_integers_of_numpy(target, expected):
    numbers = {"n_ctx": np.int64(256), "n_threads": np.int32(1), "type_k": np.int64(F32), "n_batch": np.int64(64)}
    fly = FlyLlama(target, drafter=PromptLookup(), adaptive=False, **{**OPTIONS, **numbers})
    assert answer(fly) == expected[PROMPT]
    generator = fly.generate([300, 301], temp=0.0)
    next(generator)
    assert isinstance(generator.send(np.array([302, 303], dtype=np.intc)), int)


@pytest.mark.parametrize("name", ["n_threads", "n_threads_batch"])
@pytest.mark.parametrize("n", [-1, 0, None, "auto", 1])
def test_thread_counts_of_any_kind(n, name, target, expected):
    fly = FlyLlama(target, drafter=PromptLookup(), adaptive=False, **{**OPTIONS, name: n})
    assert answer(fly) == expected[PROMPT]
    for wrong in (513, 10**6, 1.5, True, "many"):
        with pytest.raises(ValueError, match=f"{name} must be (an integer in 1..512|a number of threads)"):
            FlyLlama(target, **{**OPTIONS, name: wrong})


@pytest.mark.parametrize(
    "name, wrong",
    [("n_ctx", n) for n in (-1, 2**31, 512.0, None)] + [("n_batch", n) for n in (0, -1, "8")] + [("n_ubatch", -5)],
)
def test_sizes_that_are_none(name, wrong, target):
    with pytest.raises(ValueError, match=rf"{name} must be an integer >= [01], not {wrong!r}"):
        FlyLlama(target, **{**OPTIONS, name: wrong})


def test_a_context_that_no_memory_holds(target):
    pytest.importorskip("resource")
    code = """
        import resource, sys
        from pyfly_cpp import FlyLlama
        from pyfly_cpp.machine import memory
        memory.available = lambda: None  # no system tells what this limit leaves
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        try:
            FlyLlama(sys.argv[1], n_ctx=1 << 30, n_threads=1, verbose=False)
        except ValueError as error:
            print(error)
    """
    assert re.search(r"could not make a context.*lower n_ctx or n_batch", in_child(code, target))


def test_a_context_that_is_larger_than_what_is_free(target, monkeypatch):
    """Nothing of that size is made to find out."""
    sizes, make = [], llama_cpp.llama_init_from_model

    def look(model, params):
        sizes.append(params.n_ctx)
        return make(model, params)

    monkeypatch.setattr(llama_cpp, "llama_init_from_model", look)
    said = r"a context of \d+ tokens would need .* are free; lower n_ctx\."
    with pytest.raises(ValueError, match=said) as failure:
        FlyLlama(target, **{**OPTIONS, "n_ctx": 999_999_999})
    assert in_options(failure.value).endswith("lower --n-ctx.")
    assert max(sizes) <= 2**18
    for n_ctx in (512, 0):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=said):
            patch.setattr(memory, "available", lambda: 1)
            FlyLlama(target, kernels="stock", **{**OPTIONS, "n_ctx": n_ctx})


def test_the_memory_that_a_loaded_model_takes_is_no_obstacle_to_it(target, monkeypatch):
    with FlyLlama(target, **OPTIONS) as fly:
        monkeypatch.setattr(memory, "available", lambda: 1)
        fly.drafter = PromptLookup()
        assert answer(fly)


def test_a_subclass_in_place_of_llama(target):
    """Somebody else may have put a subclass with other parameters where the base class was."""
    code = """
        import sys
        import llama_cpp

        class Traced(llama_cpp.Llama):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)

        if sys.argv[2] == "before":
            llama_cpp.Llama = Traced
        from pyfly_cpp import FlyLlama, PromptLookup
        llama_cpp.Llama = Traced
        llm = FlyLlama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False, drafter=PromptLookup())
        try:
            FlyLlama(sys.argv[1], n_bach=4)
        except ValueError as error:
            assert "n_batch" in str(error)
        print(llm("Tom", max_tokens=3)["usage"]["completion_tokens"])
    """
    for when in ("before", "after"):
        assert in_child(code, target, when) == "3\n"


# ---- Several users ---------------------------------------------------------------------------------------------------


def test_threads_that_generate_and_stop(target, expected):
    """Generations that are cut short, by threads that know nothing of each other: each gets the right tokens or
    BusyError, and the object stays right."""
    fly = FlyLlama(target, drafter=PromptLookup(), adaptive=False, **OPTIONS)
    whole = {}
    for prompt in (PROMPT, SHORT):
        tokens = fly.tokenize(prompt.encode())
        whole[prompt] = tokens, [t for _, t in zip(range(30), fly.generate(tokens, temp=0.0))]
    failures, fine = [], []

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(60):
            tokens, right = whole[(PROMPT, SHORT)[int(rng.integers(2))]]
            n = int(rng.integers(1, 12))
            try:
                generator = fly.generate(tokens, temp=0.0)
                found = [next(generator) for _ in range(n)]
                generator.close()
                (failures if found != right[:n] else fine).append(found)
                if rng.random() < 0.2:
                    fly.load_state(fly.save_state())
            except BusyError:
                continue
            except BaseException as error:
                failures.append(error)

    at_once(work, range(3))
    assert not failures and fine
    assert answer(fly) == expected[PROMPT]


def test_threads_with_requests_of_their_own(target):
    """What a completion asks of its generation (log-probabilities) goes to no other thread's."""
    fly = FlyLlama(target, **OPTIONS)
    failures, lock = [], threading.Lock()

    def work(logprobs):
        for _ in range(20):
            stream = fly._create_completion(SHORT, max_tokens=3, temperature=0, logprobs=logprobs)
            with lock:  # one after the other, but each request is made before the other's generation starts
                try:
                    got = next(stream)["choices"][0]["logprobs"]
                except BusyError:
                    continue
            if (got is None) != (logprobs is None):
                failures.append((logprobs, got))

    at_once(work, (None, 2))
    assert not failures


class _Slow:
    """A tokenizer that has read nothing before it may."""

    def __init__(self):
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def tokenize(self, *_, **__):
        self.has_begun.set()
        assert self.may_end.wait(10)
        return [5]


def test_closing_while_another_thread_tokenizes(target):
    """The model is not freed under it: closing is refused, and by a batch it waits."""
    for kind in (FlyLlama, FlyBatch):
        slow = _Slow()
        one = kind(target, tokenizer=slow, **OPTIONS)
        with ThreadPoolExecutor() as pool:
            tokens = pool.submit(one.tokenize, b"A")
            assert slow.has_begun.wait(10)
            if kind is FlyLlama:
                with pytest.raises(BusyError, match="another thread tokenizes"):
                    one.close()
            else:
                closing = pool.submit(one.close)
                assert not wait([closing], 0.1).done
            slow.may_end.set()
            assert tokens.result(10) == [5]
            one.close()
            with pytest.raises(ValueError, match="is closed"):
                one.tokenize(b"A")


def test_closing_a_batch_where_one_tokenizes(target):
    """As a signal handler may: it does not wait for itself."""
    batch = FlyBatch(target, **OPTIONS)
    with batch.model.access.reading():
        batch.close()
    batch.close()
    with pytest.raises(ValueError, match="is closed"):
        batch.tokenize(b"A")


def test_an_interrupt_while_one_tokenizes_leaves_nothing_behind(interrupt_in):
    access = Access()
    for _ in range(300):
        with contextlib.suppress(KeyboardInterrupt):
            interrupt_in(2e-4)
            while True:
                with access.reading():
                    pass
    access.close(waits=False)


def test_a_vocabulary_of_a_closed_model(target):
    fly = FlyLlama(target, **OPTIONS)
    vocabulary = fly.vocabulary
    assert vocabulary.piece(300)
    fly.close()
    for use in (lambda: vocabulary.piece(301), lambda: vocabulary.ends_text(301), vocabulary.infill_tokens):
        with pytest.raises(ValueError, match="is closed"):
            use()


@pytest.mark.parametrize("where", ["drafter", "processor", "stopping"])
def test_use_from_within_a_generation(where, target, expected):
    """A callback may look at the object; what would pull it away from under the generation is refused."""
    refused = []

    def use(*_):
        fly = users[0]
        state = states[0]
        for call in (
            fly.close,
            fly.save_state,
            lambda: fly.load_state(state),
            lambda: fly.eval([3]),
            lambda: fly.embed("x"),
            lambda: next(fly.generate([3])),
            lambda: setattr(fly, "drafter", None),
        ):
            with pytest.raises(BusyError, match="in use, by another thread or by the very generation"):
                call()
            refused.append(call)

    def drafter(tokens):
        if where == "drafter":
            use()
        return []

    def processor(_, scores):
        if where == "processor":
            use()
        return scores

    users, states = [], []
    users.append(FlyLlama(target, drafter=drafter, adaptive=False, **OPTIONS))
    states.append(users[0].save_state())
    processors = LogitsProcessorList([processor])
    if where == "stopping":
        stop = llama_cpp.StoppingCriteriaList([lambda ids, row: users[0].close() or False])
        with pytest.raises(ValueError, match="closed; load the model again"):
            users[0](PROMPT, max_tokens=10, stopping_criteria=stop)
        return
    result = users[0](PROMPT, max_tokens=40, temperature=0, logits_processor=processors)["choices"]
    assert result == expected[PROMPT] and refused


def test_loading_in_two_threads_and_while_loading(target):
    """Guards against llama.cpp's assertions overlap; none takes another's away, and none is left."""
    code = """
        import sys, threading
        import llama_cpp
        from llama_cpp import _ggml
        import ctypes
        from pyfly_cpp import FlyLlama, _native

        setter = _ggml.libggml.ggml_set_abort_callback
        setter.restype, setter.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

        def installed():
            found = setter(None)
            setter(found)
            return found is not None

        a_is_in, a_is_out = threading.Event(), threading.Event()
        def other():
            with _native.load_guard():
                a_is_in.set()
                assert a_is_out.wait(30)
                assert installed()
        assert not installed()
        thread = threading.Thread(target=other)
        with _native.load_guard():
            thread.start()
            assert a_is_in.wait(30)
        a_is_out.set()
        thread.join()
        assert not installed()

        def load_another(_):
            if len(loaded) < 1:
                loaded.append(FlyLlama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False))
            assert installed()
        loaded = []
        FlyLlama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False, on_load=load_another)
        assert not installed() and loaded
        print("fine")
    """
    assert in_child(code, target) == "fine\n"


def test_loading_in_two_threads_loses_no_output(target):
    """llama-cpp-python leads stdout and stderr of the process away while it loads without output, and back again."""
    code = """
        import os, sys, threading
        from pyfly_cpp import FlyLlama

        def load(name, wait):
            FlyLlama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False, on_load=wait).close()
            loaded[name].set()

        def wait_for_second(_):  # once: it is called for each tensor, and a second load may wait for this one
            if not loading["first"].is_set():
                loading["first"].set()
                loading["second"].wait(1)

        def wait_for_first(_):
            loading["second"].set()
            loaded["first"].wait(30)

        loading, loaded = ({name: threading.Event() for name in ("first", "second")} for _ in range(2))
        threads = [threading.Thread(target=load, args=("first", wait_for_second)),
                   threading.Thread(target=load, args=("second", wait_for_first))]
        before = [os.fstat(descriptor).st_ino for descriptor in (1, 2)]
        threads[0].start()
        assert loading["first"].wait(30)
        threads[1].start()
        for thread in threads:
            thread.join()
        assert [os.fstat(descriptor).st_ino for descriptor in (1, 2)] == before
        print("fine")
    """
    assert in_child(code, target) == "fine\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_while_another_thread_loads(target):
    code = """
        import os, signal, sys, threading
        from pyfly_cpp import FlyLlama

        def wait(_):
            loading.set()
            forked.wait(60)

        def load(on_load=None):
            return FlyLlama(sys.argv[1], n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False, on_load=on_load)

        loading, forked = threading.Event(), threading.Event()
        load().close()
        thread = threading.Thread(target=load, args=(wait,))
        thread.start()
        assert loading.wait(30)
        if os.fork() == 0:
            signal.alarm(30)
            os._exit(7 if load()("Tom", max_tokens=2)["choices"] else 1)
        status = os.wait()[1]
        forked.set()
        thread.join()
        print(os.WEXITSTATUS(status), os.WIFEXITED(status))
    """
    assert in_child(code, target) == "7 True\n"


# ---- The end ---------------------------------------------------------------------------------------------------------


def test_whatever_is_asked_of_a_closed_object(target):
    code = """
        import sys
        from pyfly_cpp import FlyLlama, PromptLookup

        llm = FlyLlama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False, drafter=PromptLookup())
        llm("Tom has", max_tokens=3)
        state = llm.save_state()
        generator = llm.generate([300, 301])
        next(generator)
        llm.close()
        llm.close()
        calls = [llm.save_state, lambda: llm.load_state(state), lambda: llm.eval([1]), lambda: llm.tokenize(b"x"),
                 lambda: llm.detokenize([1]), lambda: llm.embed("x"), lambda: llm("x"), llm.n_ctx, llm.n_vocab,
                 llm.token_eos, lambda: next(generator), lambda: llm.can_speculate, lambda: llm.sample(),
                 lambda: llm.protected, lambda: setattr(llm, "drafter", PromptLookup()),
                 lambda: llm.create_chat_completion([{"role": "user", "content": "x"}])]
        for i, call in enumerate(calls):
            try:
                call()
            except ValueError as error:
                assert "closed; load the model again" in str(error), (i, error)
            else:
                raise SystemExit(f"call {i} went through")
        print("fine")
    """
    assert in_child(code, target) == "fine\n"


def test_daemon_threads_in_callbacks_when_the_program_ends(target, tiny_draft):
    """Before Python 3.14 each is ended where it asks for the GIL: below C++ that called Python."""
    code = """
        import sys, threading, time
        from pyfly_cpp import DraftModel, FlyLlama

        class Late:
            # Destroyed when the program has begun to end; the threads get the GIL meanwhile, if they may have it.
            def __del__(self, sleep=time.sleep):
                sleep(0.5)

        sys.late = Late()  # the threads keep the globals of this module
        target, draft = sys.argv[1:]
        in_drafter, in_bias, in_load = events = [threading.Event() for _ in range(3)]

        def load(**settings):
            return FlyLlama(target, n_ctx=256, n_threads=1, verbose=False, adaptive=False, **settings)

        def slow_drafter(tokens):
            in_drafter.set()
            time.sleep(0.01)
            return tokens[-2:]

        def complete(llm, begun, **request):
            while True:
                llm("Tom has 3 apples", max_tokens=30, **request)
                begun.set()

        def open_drafts():  # llama.cpp logs, and its log is a Python function
            opened = []  # none is freed: what llama.cpp logs then stands in destructors of its own
            while True:
                opened.append(load(drafter=DraftModel(draft)))
                in_load.set()

        for work, *arguments, request in (
            (complete, load(drafter=slow_drafter), in_drafter, {}),
            (complete, load(), in_bias, {"logit_bias": {7: 3.0}}),
            (open_drafts, {}),
        ):
            threading.Thread(target=work, args=arguments, kwargs=request, daemon=True).start()
        for event in events:
            assert event.wait(60)
    """
    in_child(code, target, tiny_draft)  # prints nothing: the base class closes stdout while it loads


def test_what_nobody_closed_is_closed_before_modules_go(tiny_target):
    """llama.cpp's log is a function of a Python module: with PyTorch imported, closing later ended in a crash."""
    code = f"""
        import atexit
        atexit.register(lambda: print(llm._access.is_closed))  # called after those that are registered later
        from pyfly_cpp import FlyLlama
        llm = FlyLlama({str(tiny_target)!r}, n_threads=1, verbose=False)
        llm("Tom", max_tokens=2)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["True"]), done.stderr


def test_an_object_that_was_never_made():
    """Its destructor has nothing to say."""
    code = """
        from pyfly_cpp import FlyLlama
        for arguments in ({}, {"model_path": "no.gguf"}, {"model_path": "x", "nonsense": 1}):
            try:
                FlyLlama(**arguments)
            except (TypeError, ValueError):
                print("fine")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("fine\n" * 3, "")


def test_a_generator_that_is_collected_during_a_call(target, expected):
    """The collector may close a generation in mid-call, on the same thread: nothing waits for itself."""
    fly = FlyLlama(target, drafter=PromptLookup(), adaptive=False, **OPTIONS)
    generator = fly.generate(fly.tokenize(PROMPT.encode()), temp=0.0)
    next(generator)
    with fly._access.exclusive():
        generator.close()
    assert answer(fly, SHORT) == expected[SHORT]
    assert answer(fly) == expected[PROMPT]


def test_ctrl_c_right_behind_the_acquisition(target, expected):
    """Python hears of it when the call of C has returned: the object is not in use then."""
    fly = FlyLlama(target, drafter=PromptLookup(), adaptive=False, **OPTIONS)
    use = fly._access.exclusive()

    def interrupted(blocking):
        fly._access.lock.acquire(blocking)
        raise KeyboardInterrupt

    use._acquire = interrupted
    with pytest.raises(KeyboardInterrupt), use:
        pass
    assert answer(fly) == expected[PROMPT]
    fly.close()


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("name", ["pyfly_batch_begin", "pyfly_batch_end"])
def test_a_signal_handler_raises_beside_a_native_call(name, is_done, target, expected, monkeypatch):
    """Right before it, or when it has done its work."""
    fly = FlyLlama(target, drafter=PromptLookup(), adaptive=False, **OPTIONS)
    real = native_batch.lib

    class Struck:
        def __getattr__(self, attribute):
            return strike if attribute == name else getattr(real, attribute)

    def strike(*arguments):
        monkeypatch.undo()
        if is_done:
            getattr(real, name)(*arguments)
        raise TimeoutError

    for prompt in (PROMPT, SHORT):
        monkeypatch.setattr(native_batch, "lib", Struck())
        with pytest.raises(TimeoutError):
            fly(prompt, max_tokens=5, logits_processor=LogitsProcessorList([lambda ids, scores: scores]))
        gc.collect()
        fly.drafter = PromptLookup()
        assert answer(fly, prompt) == expected[prompt]
    fly.close()


def test_a_signal_handler_raises_behind_an_acquisition(target, expected):
    """Behind each that a completion makes: the object is not in use then, also while somebody keeps the exception."""
    fly = FlyLlama(target, drafter=PromptLookup(), adaptive=False, **OPTIONS)
    real, kept = fly._access.lock, []

    class Struck:
        def __init__(self, n):
            self.n = n

        def acquire(self, blocking=True):
            taken = real.acquire(blocking)
            self.n -= 1
            if self.n == 0:
                raise TimeoutError
            return taken

        def __getattr__(self, name):
            return getattr(real, name)

    while len(kept) < 100:
        fly._access.lock = Struck(len(kept) + 1)
        try:
            fly(SHORT, max_tokens=2, temperature=0)
            break
        except TimeoutError as error:
            kept.append(error)
        finally:
            fly._access.lock = real
        assert expected[SHORT][0]["text"].startswith(answer(fly, SHORT, 3)[0]["text"])
    assert 3 < len(kept) < 100
    fly.close()


def test_drafters_that_cannot_be_replaced_stay(target, expected):
    fly = FlyLlama(target, drafter=PromptLookup(), adaptive=False, **OPTIONS)
    decoder = fly.loaded.decoder
    generator = fly.generate(fly.tokenize(PROMPT.encode()), temp=0.0)
    tokens = [next(generator)]
    before = decoder.drafters
    with pytest.raises(ValueError, match="between requests, not during one"):
        decoder.drafters = []
    assert decoder.drafters is before
    tokens += [token for _, token in zip(range(39), generator)]
    assert fly.detokenize(tokens).decode() == expected[PROMPT][0]["text"]
    assert answer(fly, SHORT) == expected[SHORT]
    fly.close()
