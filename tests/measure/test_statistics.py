"""Against scipy, and by simulation if a property is claimed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyfly_cpp.measure.statistics import (
    Flips,
    bootstrap,
    design_effect,
    flips,
    jackknife,
    low_of_several,
    mcnemar_exact,
    paired_difference,
    ratio,
    ratio_of_ratios,
    recovery,
    t_quantile,
    wilson,
)

scipy_stats = pytest.importorskip("scipy.stats")


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_two_sided_binomial_test(harmful, helpful):
    n = harmful + helpful
    expected = scipy_stats.binomtest(harmful, n, 0.5).pvalue if n else 1.0
    assert mcnemar_exact(harmful, helpful) == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson(pair):
    k, n = pair
    mine = wilson(k, n)
    theirs = scipy_stats.binomtest(k, n).proportion_ci(0.95, method="wilson")
    assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)
    assert 0 <= mine.low <= mine.estimate + 1e-12 and mine.estimate - 1e-12 <= mine.high <= 1


def test_wilson_of_nothing():
    assert math.isnan(wilson(0, 0).estimate)
    with pytest.raises(ValueError, match=r"0\.\.3"):
        wilson(4, 3)


@pytest.mark.parametrize(("p", "n_groups", "alike"), [(0.95, 20, 1.0), (0.95, 20, 0.0), (0.6, 40, 0.5)])
def test_wilson_covers_where_items_are_alike(p, n_groups, alike):
    """Three forms of each prompt, of which a share stands or falls together."""
    rng = np.random.default_rng(11)
    names = [str(i // 3) for i in range(3 * n_groups)]
    n_simulations, covered = 400, 0
    for _ in range(n_simulations):
        together = np.repeat(rng.random(n_groups) < alike, 3)
        right = np.where(together, np.repeat(rng.random(n_groups) < p, 3), rng.random(3 * n_groups) < p)
        interval = wilson(int(right.sum()), len(right), design_effect(right - right.mean(), names))
        covered += interval.low <= p <= interval.high
    assert covered / n_simulations >= 0.90


def test_design_effect():
    names = [str(i // 3) for i in range(12)]
    assert design_effect(np.zeros(12), names) == 3, "nothing is known"
    assert design_effect(np.repeat([0.5, -0.5, 0.5, -0.5], 3), names) == 3
    assert design_effect([1, -1, 0] * 4, names) == 1
    assert design_effect([0.5, -0.5], ["a", "b"]) == 1 and design_effect([0.5, -0.5], ["a", "a"]) == 2


@given(st.floats(0.5, 0.999), st.integers(4, 100))
def test_t_quantile(p, n):
    assert t_quantile(p, n) == pytest.approx(scipy_stats.t.ppf(p, n), rel=0.01, abs=1e-9)


def timed(rng, n_prompts, n_settings):
    """Columns of tokens and of seconds of settings that are equally fast."""
    tokens = rng.integers(60, 130, size=(n_settings, n_prompts)).astype(float)
    return tokens, tokens / 10 * rng.lognormal(0, 0.2, size=(n_settings, n_prompts))


@pytest.mark.parametrize("n_prompts", [5, 12, 40])
def test_jackknife_covers(n_prompts):
    """However few the prompts are."""
    rng = np.random.default_rng(12)
    n_simulations, covered = 1000, 0
    for _ in range(n_simulations):
        (mine, theirs), (seconds, other_seconds) = timed(rng, n_prompts, 2)
        interval = jackknife(np.column_stack([mine, seconds, theirs, other_seconds]), ratio_of_ratios)
        covered += interval.low <= 1 <= interval.high
    assert 0.93 <= covered / n_simulations <= 0.975


@pytest.mark.parametrize("n_prompts", [5, 12])
def test_the_best_of_several_is_rarely_above_by_chance(n_prompts):
    rng = np.random.default_rng(13)
    n_simulations, n_others, wrong = 400, 5, 0
    for _ in range(n_simulations):
        tokens, seconds = timed(rng, n_prompts, n_others + 1)
        intervals = [
            jackknife(np.column_stack([tokens[i], seconds[i], tokens[0], seconds[0]]), ratio_of_ratios)
            for i in range(1, n_others + 1)
        ]
        wrong += any(low_of_several(one, n_prompts, n_others) > 1 for one in intervals)
        assert all(low_of_several(one, n_prompts, 1) == pytest.approx(one.low) for one in intervals)
    assert wrong / n_simulations <= 0.05


def test_jackknife_of_groups_and_of_little():
    values = np.column_stack([np.arange(1, 13), np.ones(12)])
    once = jackknife(values, ratio)
    names = [str(i) for i in range(12) for _ in range(10)]
    copied = jackknife(np.repeat(values, 10, axis=0), ratio, names)
    assert (copied.estimate, copied.low, copied.high) == pytest.approx((once.estimate, once.low, once.high))
    few, nothing = jackknife(values[:4], ratio), jackknife(np.zeros((9, 2)), ratio)
    assert few.estimate == 2.5 and math.isnan(few.low) and math.isnan(low_of_several(few, 4, 5))
    assert math.isnan(nothing.estimate) and math.isnan(nothing.low)
    one_counts = jackknife([[1.0, 1.0], *[[0.0, 1.0]] * 5], ratio)
    assert one_counts.estimate > 0 and math.isnan(one_counts.low)


def test_bootstrap_agrees_with_scipy():
    rng = np.random.default_rng(2)
    tokens, seconds = rng.integers(50, 200, 60).astype(float), rng.gamma(9, 1, 60)
    mine = bootstrap(np.column_stack([tokens, seconds]), ratio, n_resamples=20000)
    theirs = scipy_stats.bootstrap(
        (tokens, seconds), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, method="percentile",
        n_resamples=20000, rng=np.random.default_rng(3), vectorized=True,
    ).confidence_interval  # fmt: skip
    width = theirs.high - theirs.low
    assert mine.estimate == pytest.approx(tokens.sum() / seconds.sum())
    assert abs(mine.low - theirs.low) < 0.05 * width and abs(mine.high - theirs.high) < 0.05 * width


def test_bootstrap_covers():
    """Of simulated speedups with a known truth, about 95 % of the intervals hold it."""
    rng = np.random.default_rng(4)
    n_simulations, n_prompts = 300, 40
    covered = 0
    for i in range(n_simulations):
        tokens = rng.integers(60, 130, size=(n_prompts, 2))
        noise = rng.lognormal(0, 0.25, size=(n_prompts, 2)) / math.exp(0.25**2 / 2)
        seconds = tokens / [15, 10] * noise  # speeds 15 and 10: the speedup is 1.5
        table = np.column_stack([tokens[:, 0], seconds[:, 0], tokens[:, 1], seconds[:, 1]])
        interval = bootstrap(table, ratio_of_ratios, n_resamples=500, seed=i)
        covered += interval.low <= 1.5 <= interval.high
    assert 0.90 <= covered / n_simulations <= 0.985


def test_bootstrap_resamples_groups():
    """Ten copies of every item are no ten times the evidence."""
    rng = np.random.default_rng(5)
    values = np.column_stack([rng.random(12), np.ones(12)])
    names = [str(i) for i in range(12)]
    once = bootstrap(values, ratio)
    copied = np.repeat(values, 10, axis=0)
    naive = bootstrap(copied, ratio)
    grouped = bootstrap(copied, ratio, groups=[name for name in names for _ in range(10)])
    assert naive.high - naive.low < 0.5 * (once.high - once.low)
    assert grouped.high - grouped.low == pytest.approx(once.high - once.low, rel=0.1)


def test_bootstrap_is_seeded_and_honest():
    values = np.column_stack([np.arange(10), np.ones(10)])
    assert bootstrap(values, ratio, seed=1) == bootstrap(values, ratio, seed=1) != bootstrap(values, ratio, seed=2)
    assert math.isnan(bootstrap(values[:3], ratio).low), "three items determine no interval"
    assert math.isnan(bootstrap(np.zeros((9, 2)), ratio).estimate)
    with pytest.raises(ValueError, match="groups"):
        bootstrap(values, ratio, groups=["a"])
    with pytest.raises(ValueError, match="shape"):
        bootstrap([1, 2, 3], ratio)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=50))
def test_flips(pairs):
    counts = flips([a for a, _ in pairs], [b for _, b in pairs])
    assert counts.harmful == sum(a and not b for a, b in pairs)
    assert counts.helpful == sum(b and not a for a, b in pairs)
    assert counts.harmful + counts.helpful + counts.both_right + counts.both_wrong == len(pairs)
    assert flips([a for a, _ in pairs], [a for a, _ in pairs]).p == 1.0


def test_recovery():
    right = [True] * 40 + [False] * 10
    assert recovery(right, right).estimate == 1.0
    half = [True] * 20 + [False] * 30
    interval = recovery(right, half)
    assert interval.estimate == 0.5 and interval.low < 0.5 < interval.high
    assert math.isnan(recovery([False] * 10, [True] * 10).estimate)
    with pytest.raises(ValueError, match="same items"):
        recovery([True], [])


@pytest.mark.parametrize(
    ("n", "harmful", "helpful", "right"),
    [(60, 0.01, 0.005, 0.6), (60, 0.02, 0.01, 0.6), (60, 0.3, 0.02, 0.5), (12, 0.3, 0.05, 0.6)],
)
def test_recovery_covers(n, harmful, helpful, right):
    rng = np.random.default_rng(8)
    truth, n_simulations, covered = (right - harmful + helpful) / right, 400, 0
    for _ in range(n_simulations):
        drawn = rng.multinomial(n, [harmful, helpful, right - harmful, 1 - right - helpful])
        baseline, other = (np.repeat(pattern, drawn) for pattern in ([1, 0, 1, 0], [0, 1, 1, 0]))
        interval = recovery(baseline, other)
        covered += interval.low <= truth <= interval.high
    assert covered / n_simulations >= 0.93


def test_recovery_is_never_certain():
    right = [True] * 40 + [False] * 20
    alone, alike = recovery(right, right), recovery(right, right, [str(i // 3) for i in range(60)])
    assert alike.low < alone.low < 0.97 and 1.03 < alone.high < alike.high
    none = recovery(right, [False] * 60)
    assert none.estimate == none.low == 0 < none.high < 0.2


def test_paired_difference_covers_and_is_never_certain():
    rng = np.random.default_rng(6)
    n, n_simulations, covered = 60, 600, 0
    for _ in range(n_simulations):
        harmful, helpful, both, neither = rng.multinomial(n, [0.06, 0.03, 0.7, 0.21])
        interval = paired_difference(Flips(int(harmful), int(helpful), int(both), int(neither)))
        covered += interval.low <= -0.03 <= interval.high
    assert covered / n_simulations >= 0.93
    none = paired_difference(Flips(0, 0, 40, 20))
    assert none.estimate == 0 and none.low < -0.01 and none.high > 0.01
