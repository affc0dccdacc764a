"""Every decision of the golden vectors, through the C++ core. README.md beside this file says where they come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyfly_cpp import Entropy, Fuzzy, Margin, PromptLookup, Window, verify

HERE = Path(__file__).parent
CODES = {"match": 0, "loose": 1, "gate": 2, "window": 3, "boundary": 4, "safety": 5}


every = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
"""One case in so many."""


def run_file(name, make, every):
    """Runs one case in so many at every parameter point; `make(data, p)` gives gate and window."""
    data = np.load(HERE / f"{name}.npz")
    n_runs = n_expected = 0
    for group in data["groups"]:
        group = str(group)
        arrays = {k[len(group) + 1 :]: data[k] for k in data.files if k.startswith(f"{group}.")}
        n_cases, n_points = arrays["n_accepted"].shape
        n_expected += len(range(0, n_cases, every)) * n_points
        for case in range(0, n_cases, every):
            control = arrays.get("control")
            protected = frozenset() if control is None else frozenset(t for t in control[case].tolist() if t >= 0)
            draft = arrays["draft"][case]
            for point in range(n_points):
                gate, window = make(data, point)
                result = verify(arrays["logits"][case], draft, gate=gate, window=window, protected=protected)
                where = f"{name} {group} case {case} point {point}"
                assert [CODES[d.reason] for d in result.decisions] == arrays["codes"][case, point].tolist(), where
                emitted = arrays["emitted"][case, point]
                assert result.tokens == emitted[emitted >= 0].tolist(), where
                assert result.n_accepted == arrays["n_accepted"][case, point], where
                n_runs += 1
                if point == 0:
                    check_values(name, arrays, case, result)
    assert n_runs == (7975 if every == 1 else n_expected)


def check_values(name, arrays, case, result):
    """Entropies and margins within 1e-5 of float64, computed here from the exact float32 logits."""
    logits = arrays["logits"][case].astype(np.float64)
    logp = logits - logits.max(axis=1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(axis=1, keepdims=True))
    for i, decision in enumerate(result.decisions):
        p = np.exp(logp[i])
        if name == "fly_reference":
            top = np.sort(p)[-3:]
            assert decision.entropy == pytest.approx(-(top * np.log(top)).sum(), abs=1e-5)
            assert decision.entropy == pytest.approx(arrays["topk_entropy"][case, i], abs=1e-4)  # its own float32
        elif name == "fly_paper":
            full = -(p * logp[i]).sum()
            assert decision.entropy == pytest.approx(full, abs=1e-5)
            assert decision.entropy / np.log(p.size) == pytest.approx(arrays["entropy_norm"][case, i], abs=1e-5)
        else:
            assert decision.margin == pytest.approx(arrays["delta_logp"][case, i], abs=1e-5)


@every
def test_fly_reference(every):
    def make(data, point):
        length = int(data["param_win_len"][point])
        return Entropy(float(data["param_theta"][point])), Window(length - 1, tail=length)

    run_file("fly_reference", make, every)


@every
def test_fly_paper(every):
    def make(data, point):
        return Entropy(float(data["param_theta"][point]), top=None), Window(int(data["param_window"][point]))

    run_file("fly_paper", make, every)


@every
def test_margin(every):
    def make(data, point):
        return Margin(float(data["param_tau"][point])), Window(int(data["param_window"][point]))

    run_file("margin", make, every)


@pytest.mark.slow
def test_ngram():
    data = np.load(HERE / "ngram.npz")
    n_runs = 0
    for point, (size, num) in enumerate(zip(data["param_max_ngram_size"], data["param_num_pred"])):
        lookup = PromptLookup(max_ngram_size=int(size), num_pred_tokens=int(num), match="earliest")
        with lookup.open() as reused:
            for case, length in enumerate(data["length"]):
                wanted = int(data["n_proposed"][case, point])
                if wanted == -2:
                    continue  # the reference fails here; the vectors say nothing
                history = data["tokens"][case, :length]
                expected = data["proposed"][case, point, :wanted].tolist()
                assert reused.propose(history, int(num)) == expected, (case, point)
                if case % 10 == 0:
                    assert lookup.propose(history.tolist()) == expected, (case, point)
                n_runs += 1
    assert n_runs == 7200 - 532


FUZZY = {"kl_div": "kl", "kl_div_reversed": "kl-target", "js_div": "js-code", "tv_div": "tv"}


def test_fsd():
    """Fuzzy speculative decoding judges matches, too: here every position is made a mismatch, by another choice. The
    divergences are within 1e-5: just above its own a position passes, just below it does not."""
    data = np.load(HERE / "fsd.npz")
    n_runs = 0
    for group in data["groups"]:
        get = {name: data[f"{group}.{name}"] for name in ("p_logits", "q_logits", "draft", "thresholds", "divergence")}
        n_accepted, emitted = data[f"{group}.n_accepted"], data[f"{group}.emitted"]
        kinds = []
        for name in data[f"{group}.div_names"]:
            plain = str(name).replace("top_k_", "")
            kinds.append((FUZZY[plain], None if plain == name else int(data["top_k"])))
        for case, draft in enumerate(get["draft"]):
            p, q = get["p_logits"][case], get["q_logits"][case]
            other = [*((token + 1) % p.shape[1] for token in draft), int(p[-1].argmax())]
            for d, (kind, top) in enumerate(kinds):

                def passes(threshold, kind=kind, top=top, p=p, q=q, draft=draft, other=other):
                    gate = Fuzzy(kind, threshold, top)
                    decisions = verify(p, draft, gate, Window(0), target_tokens=other, draft_logits=q).decisions
                    return np.array([decision.accepted for decision in decisions])

                for t, threshold in enumerate(get["thresholds"][d]):
                    accepted = passes(float(threshold))
                    n = int(np.argmin([*accepted, False]))
                    assert n == n_accepted[case, d, t]
                    tokens = emitted[case, d, t]
                    assert tokens[tokens >= 0].tolist() == [*draft[:n], int(p[n].argmax())]
                    n_runs += 1
                value = get["divergence"][case, d]
                slack = 1e-5 * np.maximum(value, 1e-3)
                for i in (int(np.argmin(value)), int(np.argmax(value))):
                    assert passes(float(value[i] + slack[i]))[i]
                    assert value[i] <= slack[i] or not passes(float(value[i] - slack[i]))[i]
    assert n_runs == 4845
