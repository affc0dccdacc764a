"""The draft model: what it evaluates, when it stops, and what the statistics and the trace say about it."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter

import llama_cpp
import pytest
from gguf_edit import edit_gguf, with_padding
from llama_cpp import GGML_TYPE_Q8_0

from pyfly_cpp import DraftModel, Entropy, FlyLlama, Fuzzy, Margin, PromptLookup, Window
from pyfly_cpp._native import Batch, Costs
from pyfly_cpp.engine.stats import Record

OPTIONS = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "verbose": False}
PROMPT = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."


def generate(llm, n, prompt=PROMPT, **settings):
    """n tokens behind a prompt, on behind an end of text."""
    generator = llm.generate(llm.tokenize(prompt.encode()), **{"temp": 0.0, **settings})
    tokens = list(itertools.islice(generator, n))
    generator.close()
    return tokens


@pytest.fixture(scope="module")
def plain(tiny_target):
    """700 tokens without a drafter."""
    base = llama_cpp.Llama(tiny_target, **OPTIONS)
    tokens = generate(base, 700)
    base.close()
    return tokens


def evaluated(fly):
    """Tokens the draft model has evaluated so far."""
    (drafter,) = fly.loaded.decoder.drafters
    return drafter.n_evaluated


# ---- What it evaluates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_a_verified_batch_is_never_evaluated_again(k, tiny_target, tiny_draft, plain):
    """In a step the draft evaluates its K - 1 first drafts and the one or two tokens that verification put behind what
    it has; not the drafts that were accepted."""
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, draft_max=k), **OPTIONS)
    n_prompt = len(fly.tokenize(PROMPT.encode()))
    assert generate(fly, 300) == plain[:300]
    stats = fly.stats
    assert stats.rounds > 30
    assert stats.drafted == k * stats.rounds
    assert evaluated(fly) <= n_prompt + (k + 1) * stats.rounds
    # To the token: after a step that accepted all K drafts, two tokens are new to the draft, else one.
    full = stats.accepted_at_depth[k - 1]
    assert n_prompt + stats.rounds * k - 1 <= evaluated(fly) <= n_prompt + stats.rounds * k - 1 + full


def test_the_same_prompt_again_costs_the_draft_nothing(tiny_target, tiny_draft):
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, draft_max=4), **OPTIONS)
    generate(fly, 1)
    before, steps = evaluated(fly), fly.stats.rounds
    for _ in range(3):
        generate(fly, 1)
    assert evaluated(fly) - before <= (fly.stats.rounds - steps) * 5


def test_catching_up_with_the_prompt_is_measured(tiny_target, tiny_draft):
    """The governor knows what an idle draft model would have to pay before it ever was idle."""
    fly = FlyLlama(tiny_target, drafter=[PromptLookup(), DraftModel(tiny_draft)], adaptive=True, **OPTIONS)
    generate(fly, 1)
    lookup, draft = (seconds for _, seconds in fly.stats.governor.catch_up_seconds)
    assert lookup == 0.0 and 0.0 < draft < 1.0
    native = fly.loaded.decoder.drafters[1]
    before = native.n_evaluated
    generate(fly, 1, PROMPT[40:70])  # all of it is new, though it is shorter
    has_followed = native.n_evaluated > before  # if that pays on this machine
    assert (fly.stats.governor.catch_up_seconds[1][1] != draft) == has_followed


def test_a_long_prompt_costs_what_its_window_does(tiny_target, tiny_draft, monkeypatch):
    """A prompt that is longer than the draft's context is read from the middle of that context's length before its end
    on, and such a price may pay where that of the whole prompt would not."""
    rows = tuple((n, 100_000.0) for n in (1, 2, 4, 8, 16))
    costs = Costs(rows, ((0, 1, 1, 1.0), (0, 1, 8, 8.0)), (30_000.0,))
    monkeypatch.setattr(Batch, "measure", lambda _: costs)
    monkeypatch.setenv("PYFLY_COSTS", "1")
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, n_ctx=256), adaptive=True, **OPTIONS)
    generate(fly, 1, 24 * PROMPT)
    before = evaluated(fly)
    assert 0 < before <= 128 + 8, "half of its context, and a draft"
    generate(fly, 1, 24 * PROMPT)
    assert evaluated(fly) - before <= 9, "it has been read"


def test_steps_without_it_are_caught_up_with(tiny_target, tiny_draft, plain):
    """Tokens that came without a draft are evaluated once, in one batch, when it is asked again."""
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, draft_max=4), **OPTIONS)
    fly.draft_max = 0
    n_prompt = len(fly.tokenize(PROMPT.encode()))
    assert generate(fly, 100) == plain[:100]
    assert evaluated(fly) == 0
    fly.draft_max = None
    more = fly.tokenize(PROMPT.encode()) + plain[:100]
    assert list(itertools.islice(fly.generate(more, temp=0.0), 5)) == plain[100:105]
    assert evaluated(fly) <= n_prompt + 100 + 5 * fly.stats.rounds


def test_a_draft_that_cannot_be_taken_back(tiny_target, tiny_qwen35, plain):
    """A draft model with a recurrent state builds it anew where tokens were taken back, also from earlier steps."""
    drafter = DraftModel(tiny_qwen35, draft_max=3)
    fly = FlyLlama(tiny_target, drafter=drafter, adaptive=False, **OPTIONS)
    assert generate(fly, 60) == plain[:60]
    assert fly.stats.matched > 20
    fly.gate, fly.window = Margin(2.0), Window(2, rule="reconverge")
    fly.trace = True
    tokens = fly.tokenize(PROMPT.encode())
    text = generate(fly, 60)
    assert fly.stats.rollbacks > 0
    drafted = {r.position: r.token for r in fly.records if r.depth == 1}
    assert drafted
    for position in list(drafted)[:6]:  # what it proposed first is what it says to the committed text
        fresh = FlyLlama(tiny_qwen35, **OPTIONS)
        first = next(fresh.generate([*tokens, *text][:position], temp=0.0))
        assert first == drafted[position]
        fresh.close()
    fly.close()


@pytest.mark.parametrize("n_ctx", [64, 256])
def test_a_context_smaller_than_the_history(n_ctx, tiny_target, tiny_draft, plain):
    """It goes on from its most recent window, at no cost per step, and the text is the same."""
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, draft_max=6, n_ctx=n_ctx), **OPTIONS)
    assert generate(fly, 700) == plain
    stats = fly.stats
    assert stats.drafted >= 5 * stats.rounds  # it drafted to the end
    assert stats.accepted_at_depth[0] / stats.drafted_at_depth[0] > 0.4
    assert evaluated(fly) < 8 * stats.rounds + 256


@pytest.mark.slow
@pytest.mark.parametrize("draft_max", [1, 6, 64])
def test_a_context_smaller_than_the_history_that_cannot_shift(draft_max, tiny_target, tiny_qwen35, plain):
    """A recurrent draft is built anew from the most recent half, with room for what it is to draft."""
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_qwen35, draft_max=draft_max, n_ctx=64), **OPTIONS)
    assert generate(fly, 330) == plain[:330]  # its context, rounded up, has 256 tokens
    assert fly.stats.drafted >= fly.stats.rounds  # it drafted to the end
    fly.close()


def test_a_prompt_longer_than_its_context(tiny_target, tiny_draft):
    base = llama_cpp.Llama(tiny_target, **OPTIONS)
    prompt = PROMPT * 14
    expected = base(prompt, max_tokens=60, temperature=0)["choices"]
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, n_ctx=128), adaptive=False, **OPTIONS)
    for _ in range(2):
        assert fly(prompt, max_tokens=60, temperature=0)["choices"] == expected
    assert fly.stats.drafted > 0


@pytest.mark.alike
def test_vocabularies_that_are_padded_differently(tiny_target, tiny_draft, plain, tmp_path):
    """As those of Qwen2.5's sizes are. The target's padding, in a prompt, does not disturb a draft without it; the
    draft's is never drafted."""
    longer_target = edit_gguf(tiny_target, tmp_path / "target.gguf", *with_padding(tiny_target, 64))
    longer_draft = edit_gguf(tiny_draft, tmp_path / "draft.gguf", *with_padding(tiny_draft, 64, is_likely=True))
    ends = {"tokenizer.ggml.eos_token_id": 1533, "tokenizer.ggml.eot_token_id": 1533}  # which it does not add by itself
    other_ends = edit_gguf(tiny_draft, tmp_path / "ends.gguf", ends)

    for draft in (longer_draft, other_ends):
        fly = FlyLlama(tiny_target, drafter=DraftModel(draft, draft_max=4), **OPTIONS)
        assert generate(fly, 200) == plain[:200]
        assert fly.stats.accepted_at_depth[0] > 20
    prompt = [5, 6, 1590, 7, 1599, 8]
    base = llama_cpp.Llama(str(longer_target), **OPTIONS)
    expected = list(itertools.islice(base.generate(prompt, temp=0.0), 120))
    fly = FlyLlama(longer_target, drafter=DraftModel(tiny_draft, draft_max=4), **OPTIONS)
    assert list(itertools.islice(fly.generate(prompt, temp=0.0), 120)) == expected
    assert fly.stats.accepted_at_depth[0] > 10
    for target, draft in ((tiny_target, longer_draft), (longer_target, tiny_draft)):  # rows of the target's length
        fly = FlyLlama(target, drafter=DraftModel(draft, draft_max=4), gate=Fuzzy("js", 0.3), **OPTIONS)
        assert fly("Once", max_tokens=60)["choices"][0]["text"]


@pytest.mark.parametrize(
    "settings",
    [{"n_batch": 8}, {"n_batch": 1}, {"type_k": GGML_TYPE_Q8_0}, {"n_threads": 2}, {"n_gpu_layers": 0}],
    ids=str,
)
def test_its_own_settings(settings, tiny_target, tiny_draft, plain):
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, draft_max=5, **settings), **OPTIONS)
    assert generate(fly, 80) == plain[:80]
    assert fly.stats.matched > 20


def test_the_target_as_its_own_draft(tiny_target, plain):
    """Everything is accepted: K + 1 tokens a step."""
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_target, draft_max=4), **OPTIONS)
    assert generate(fly, 200) == plain[:200]
    assert fly.stats.mean_accepted > 4.5


# ---- When it stops ---------------------------------------------------------------------------------------------------


def test_p_min_stops_early(tiny_target, tiny_draft, plain):
    drafted, acceptance = [], []
    for p_min in (0.0, 0.5, 0.9, 1.0):
        fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, draft_max=8, p_min=p_min), **OPTIONS)
        assert generate(fly, 300) == plain[:300]
        drafted.append(fly.stats.drafted / fly.stats.rounds)
        acceptance.append(fly.stats.acceptance)
    assert drafted[0] == 8
    assert drafted[0] > drafted[1] > drafted[2] > drafted[3]
    assert acceptance[0] < acceptance[1] < acceptance[2]


def test_no_draft_beyond_the_tokens_that_are_wanted(tiny_target, tiny_draft):
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, draft_max=8), **OPTIONS)
    fly(PROMPT, max_tokens=1, temperature=0)
    assert fly.stats.drafted == 0
    fly.reset_stats()
    fly(PROMPT, max_tokens=4, temperature=0)
    assert fly.stats.committed == 4
    assert len(fly.stats.drafted_at_depth) <= 3


def test_only_what_is_given_out_is_counted(tiny_target, tiny_draft):
    loose = {"gate": Margin(2.0), "window": Window(6, rule="reconverge")}
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, draft_max=8), trace=True, **loose, **OPTIONS)
    whole = fly(PROMPT, max_tokens=60, temperature=0)
    n_committed = fly.stats.committed
    assert n_committed == whole["usage"]["completion_tokens"] == 60
    for i in (3, 7, 12, 20, 33):  # wherever in a step a stop text ends the answer
        fly.reset_stats()
        stop = fly.detokenize([r.token for r in fly.records[i : i + 2]]).decode()
        usage = fly(PROMPT, max_tokens=60, temperature=0, stop=[stop])["usage"]
        stats, records = fly.stats, fly.records
        assert stats.committed == usage["completion_tokens"] == len(records)
        assert stats.matched == sum(r.origin == "matched" for r in records)
        assert stats.loose_accepted == sum(r.origin == "loose" for r in records)
        assert sum(stats.accepted_at_depth) == stats.matched + stats.loose_accepted
        fly(PROMPT, max_tokens=60, temperature=0)
    stream = fly.generate(fly.tokenize(PROMPT.encode()), temp=0.0)
    next(stream)
    fly.reset_stats()
    stream.close()
    assert fly.stats.committed == 0, "what was reset is not taken back once more"


# ---- Statistics and trace --------------------------------------------------------------------------------------------

LOOSE = [
    (Margin(1.0), Window(2, rule="reconverge")),
    (Entropy(0.3), Window(2)),
    (Entropy(0.0), Window(0)),
    ("exact", Window()),
]


@pytest.mark.parametrize(("gate", "window"), LOOSE, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_statistics_and_trace(gate, window, temperature, tiny_target, tiny_draft):
    fly = FlyLlama(
        tiny_target, drafter=DraftModel(tiny_draft, draft_max=6), gate=gate, window=window, trace=True, **OPTIONS
    )
    n_prompt = len(fly.tokenize(PROMPT.encode()))
    tokens = generate(fly, 200, temp=temperature)
    stats, records = fly.stats, fly.records
    assert fly.stats.as_dict()["committed"] == stats.committed

    # Every token has its record, and what nobody asked for is not counted.
    assert [r.token for r in records] == tokens
    assert [r.position for r in records] == list(range(n_prompt, n_prompt + 200))
    assert stats.committed == 200
    origins = [sum(r.origin == o for r in records) for o in ("matched", "loose", "target")]
    assert origins == [stats.matched, stats.loose_accepted, 200 - stats.matched - stats.loose_accepted]

    # Sums.
    assert sum(stats.drafted_at_depth) == stats.drafted
    assert sum(stats.accepted_at_depth) == stats.matched + stats.loose_accepted <= stats.drafted
    assert all(a <= d for a, d in zip(stats.accepted_at_depth, stats.drafted_at_depth))
    assert list(stats.drafted_at_depth) == sorted(stats.drafted_at_depth, reverse=True)
    assert sum(n for _, n in stats.accepted_by_drafter) == stats.matched + stats.loose_accepted
    assert stats.mean_accepted == pytest.approx(stats.committed / stats.rounds)
    assert stats.loose_rate == pytest.approx(stats.loose_accepted / stats.committed)
    assert stats.prefilled == n_prompt - 1
    for part in ("prefill", "draft", "verify", "gate", "python"):
        assert 0 <= getattr(stats, f"seconds_{part}") < 60
    assert stats.seconds_draft > 0 and stats.seconds_verify > 0
    assert 0 < stats.seconds_catch_up < stats.seconds_prefill
    is_exact = gate == "exact"
    assert (stats.loose_accepted == 0) == is_exact
    if stats.loose_accepted:
        assert stats.mean_margin_loose > 0 or temperature > 0
    else:
        assert math.isnan(stats.mean_margin_loose)

    # Records.
    for record in records:
        check_record(record)
    assert {r.round for r in records} <= set(range(stats.rounds))
    steps = [r.round for r in records]
    if not window.outlives_step:
        assert steps == sorted(steps)
        assert len(set(steps)) == max(steps) + 1
        n_rejected = sum(bool(r.rejected) for r in records)
        reasons = [stats.rejected_gate, stats.rejected_window, stats.rejected_boundary, stats.rejected_safety]
        assert n_rejected <= sum(reasons)
    generate(fly, 3)
    assert len(fly.records) == 3  # of the last generation alone
    fly.reset_stats()
    assert fly.stats.committed == fly.stats.rounds == 0 and fly.stats.seconds_python == 0
    assert fly.stats.summary() == "no tokens yet"


def check_record(record):
    assert isinstance(record, Record)
    assert 0 < record.probability <= 1 + 1e-6 and record.logprob <= 1e-6
    assert record.entropy >= -1e-6 and record.margin >= -1e-6
    if record.origin == "target":
        assert record.depth == 0 and record.token == record.choice
        assert record.reason in ("bonus", "gate", "window", "boundary", "safety")
        assert bool(record.rejected) == (record.reason != "bonus")
    elif record.origin == "matched":
        assert record.token == record.choice and 1 <= record.depth <= 6 and record.reason == "match"
        assert record.rejected == ()
    else:
        assert record.token != record.choice and 1 <= record.depth <= 6 and record.reason == "loose"


def test_a_trace_agrees_with_logprobs(tiny_target, tiny_draft):
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft), adaptive=False, **OPTIONS)
    fly(PROMPT, max_tokens=5)
    assert fly.records == [], "none unless asked for"
    fly.trace = True
    found = fly(PROMPT, max_tokens=20, temperature=0, logprobs=1)["choices"][0]["logprobs"]["token_logprobs"]
    assert [r.logprob for r in fly.records] == pytest.approx(found, abs=1e-4)


def test_accepted_by_drafter(tiny_target, tiny_draft):
    fly = FlyLlama(tiny_target, drafter=PromptLookup(), adaptive=False, **OPTIONS)
    generate(fly, 60)
    by_lookup = fly.stats.matched
    fly.drafter = DraftModel(tiny_draft)
    generate(fly, 60)
    counts = dict(fly.stats.accepted_by_drafter)
    assert sorted(counts) == ["draft model", "prompt lookup"]
    assert counts["prompt lookup"] == by_lookup
    assert sum(counts.values()) == fly.stats.matched


def test_loose_accepts_respect_the_gate_and_the_protected(tiny_target, tiny_draft):
    """A margin gate lets nothing through beyond its margin; protected tokens are in no loose accept."""
    protected = frozenset(range(200, 400))
    fly = FlyLlama(
        tiny_target, drafter=DraftModel(tiny_draft, draft_max=6), gate=Margin(1.5), window=Window(0), trace=True,
        protected=protected, **OPTIONS,
    )  # fmt: skip
    assert protected | {1533, 1534, 1535} <= fly.protected
    generate(fly, 400)
    loose = [r for r in fly.records if r.origin == "loose"]
    assert len(loose) > 10
    assert all(0 <= r.margin < 1.5 for r in loose)
    assert not {token for r in loose for token in (r.token, r.choice)} & fly.protected
    assert fly.stats.rejected_safety > 0 and fly.stats.rejected_gate > 0


# ---- The window that a gate brings -----------------------------------------------------------------------------------


def strict_warnings(caught):
    return [str(w.message) for w in caught if "never accepts anything loosely" in str(w.message)]


def test_a_margin_gate_accepts_with_short_drafts_as_it_comes(tiny_target, tiny_draft):
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, draft_max=3), gate=Margin(2.0), **OPTIONS)
    assert fly.window == Window(0)
    tokens = generate(fly, 120)
    assert fly.stats.loose_accepted > 0 and fly.stats.rolled_back == 0
    fly.window = Window(0)
    assert generate(fly, 120) == tokens
    fly.window = None
    fly.gate = "entropy:0.3"
    assert fly.window == Window(6), "it follows the gate"
    fly.window = Window(2)
    fly.gate = Margin(0.3)
    assert fly.window == Window(2), "what was given stays"
    assert fly.__getstate__()["window"] == Window(2)
    fly.window = None
    assert fly.__getstate__()["window"] is None
    fly.close()


@pytest.mark.parametrize(
    ("loose", "advised"), [("fuzzy-js:0.7", "fuzzy-js-code:0.7"), ("margin:1", "margin:0.3")], ids=lambda gate: gate
)
def test_a_threshold_that_is_too_loose_is_warned_of_once(loose, advised, tiny_target, tiny_draft):
    with pytest.warns(UserWarning, match=rf"{loose} .*{advised.rpartition(':')[2]}") as caught:
        fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft), gate=loose, **OPTIONS)
        generate(fly, 9)
        generate(fly, 9)
        fly.gate = advised
        generate(fly, 9)
        assert len(caught) == 1 and caught[0].filename == __file__
    fly.close()


def test_what_can_never_accept_is_exact_and_says_so_once(tiny_target, tiny_draft, plain):
    short, long = DraftModel(tiny_draft, draft_max=3), DraftModel(tiny_draft, draft_max=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fly = FlyLlama(tiny_target, drafter=short, gate=Margin(0.3), window=Window(6), adaptive=False, **OPTIONS)
        assert len(strict_warnings(caught)) == 1 and "at most 3 drafts" in strict_warnings(caught)[0]
        assert caught[-1].filename == __file__
        for gate in (Margin(0.3), "entropy:0.3"):
            fly.gate = gate
            assert generate(fly, 200) == plain[:200]
        fly.gate = Margin(0.3)
        assert len(strict_warnings(caught)) == 2, "one for each gate"
        assert fly.stats.loose_accepted == fly.stats.rejected_window == 0 < fly.stats.rejected_boundary
        fly.draft_max = 2
        generate(fly, 9)
        assert len(strict_warnings(caught)) == 3, "another combination"
        fly.draft_max = None
        fly.window = Window(2)
        generate(fly, 9)
        fly.gate = "exact"
        fly.window = Window(99)
        generate(fly, 9)
        fly.gate = "entropy:0.3"
        fly.drafter = None
        generate(fly, 9)
        fly.window = None
        fly.drafter = [PromptLookup(num_pred_tokens=2), long]  # the longest counts
        generate(fly, 9)
        fly.draft_max = 0
        generate(fly, 9)
        assert len(strict_warnings(caught)) == 3
    fly.close()


# ---- Its distribution ------------------------------------------------------------------------------------------------


def test_a_model_that_drafts_for_itself_is_never_far_off(tiny_target):
    """The rows that fuzzy gates compare are those of the drafted tokens: here they are the target's own, and whatever
    is drawn in place of a draft, the gate lets the draft pass."""
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_target, draft_max=4), gate=Fuzzy("js", 1e-4), **OPTIONS)
    generate(fly, 100, temp=1.0, top_k=0, top_p=1.0, min_p=0.0)
    stats = fly.stats
    assert stats.loose_accepted > 10
    assert stats.rejected_gate == 0


def test_fuzzy_with_a_draft_model(tiny_target, tiny_draft, plain):
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, draft_max=4), **OPTIONS)
    loose = {}
    for threshold in (0.0, 0.02, 0.7):  # the last is more than a Jensen-Shannon divergence can be
        fly.gate = Fuzzy("js", threshold)
        fly.reset_stats()
        out = generate(fly, 200)
        loose[threshold] = fly.stats.loose_accepted
        if threshold == 0.0:
            assert out == plain[:200]
    assert 0 == loose[0.0] < loose[0.02] < loose[0.7]
    assert fly.stats.rejected_gate == 0


def test_fuzzy_needs_a_distribution(tiny_target, tiny_draft):
    with pytest.raises(ValueError, match="prompt lookup has none; use a draft model or a head"):
        FlyLlama(tiny_target, drafter=PromptLookup(), gate="fuzzy-js:0.1", **OPTIONS)
    fly = FlyLlama(tiny_target, drafter=PromptLookup(), **OPTIONS)
    fly.gate = "fuzzy-js:0.1"
    with pytest.raises(ValueError, match="this drafter has none; use a draft model or a head"):
        generate(fly, 5)
    fly.drafter = [PromptLookup(), DraftModel(tiny_draft)]  # what prompt lookup drafts is judged exactly
    generate(fly, 5)


# ---- What the request forbids ----------------------------------------------------------------------------------------


def test_a_banned_token_is_never_drafted_into_the_text(tiny_target, tiny_draft):
    """A bias of -100 leaves a token a probability, and rules that compare distributions take whatever is drafted while
    those are close."""
    common = [token for token, _ in Counter(generate(FlyLlama(tiny_target, **OPTIONS), 300)).most_common(10)]
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, draft_max=4), adaptive=False, **OPTIONS)
    samplings = {"temperature": 0}, {"temperature": 1, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    prompts = [
        fly.tokenize(prompt) for prompt in (b"Tom has 3 apples and 4 pears.", b"A shop sells", b"She then gives")
    ]
    for gate in ("fuzzy-js:0.1", "rfsd-js:0.1", "fuzzy-tv:0.6", "fuzzy-kl-target:3", "any(margin:1,fuzzy-js:0.4)"):
        fly.gate = gate
        fly.reset_stats()
        for prompt, sampling in itertools.product(prompts, samplings):
            fly.create_completion(prompt, max_tokens=60, seed=1, logit_bias=dict.fromkeys(common, -100), **sampling)
            assert not set(common).intersection(fly.eval_tokens[n] for n in range(len(prompt), fly.n_tokens))
        assert fly.stats.rejected_safety > 0


def test_the_first_step_is_no_part_of_the_speed(tiny_target, tiny_draft):
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, draft_max=4), **OPTIONS)
    generate(fly, 3)
    stats = fly.stats
    assert stats.beginnings == 1 and 1 <= stats.committed_first <= 3 and math.isnan(stats.tokens_per_second)
    assert stats.time_to_first_token == stats.seconds_prefill > 0
    generate(fly, 120)
    stats = fly.stats
    n = stats.committed - stats.committed_first
    assert stats.beginnings == 2 and 0 < n < 123
    assert stats.tokens_per_second == pytest.approx(n / stats.seconds_decode)
    assert stats.as_dict()["tokens_per_second"] == stats.tokens_per_second


def test_a_step_that_nobody_read_is_not_counted(tiny_target, tiny_draft):
    """As where Ctrl-C comes while the target evaluates."""
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, draft_max=4), **OPTIONS)
    fly.draft_max = 0
    tokens = fly.generate(fly.tokenize(b"Tom has 3 apples and"), temp=0)
    for _ in range(3):
        next(tokens)
    fly.loaded.decoder.batch.step_alone()
    tokens.close()
    assert fly.stats.committed == fly.stats.rounds == 3
