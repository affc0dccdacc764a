"""Preset files with anything in them: read, or refused in one sentence."""

from __future__ import annotations

import json
import math
import random

import pytest

from pyfly_cpp.decoding.presets import PresetError, load_preset, save_preset

pytestmark = pytest.mark.fuzz

GOOD = {
    "format": 1,
    "model": "target.gguf",
    "drafter": [
        {"kind": "draft", "model_path": "draft.gguf", "draft_max": 8, "p_min": 0.1, "n_ctx": 512, "n_batch": 64,
         "n_gpu_layers": -1, "n_threads": 2, "type_k": 8, "type_v": 1},
        {"kind": "lookup", "max_ngram_size": 4, "num_pred_tokens": 10, "match": "latest", "min_ngram_size": 1,
         "memory_file": "memory", "texts": ["a.txt", "b"]},
        {"kind": "cross", "draft": {"kind": "draft", "model_path": "d.gguf"}},
        {"kind": "mtp", "model_path": None, "draft_max": 3},
        {"kind": "eagle3", "model_path": "head.gguf", "p_min": 0.5},
    ],
    "gate": "any(margin:0.3,all(entropy:0.3:2,entropy-normalized:0.1))",
    "window": {"size": 6, "rule": "reconverge", "tail": 2, "across_rounds": True},
    "draft_max": 8,
    "claim": {"models": {"gpu_layers": 0}},
}  # fmt: skip
SCALARS = (None, True, False, 0, 1, -1, 512, 513, 2**31, 10**6, 10**30, 10**400, 0.0, -0.5, 1.5, 1e308, math.nan,
           math.inf, "", "exact", "margin:", "margin:nan", "entropy:1:2:3", "draft", "\0", "\n", "\ud800", "x" * 2000,
           "9" * 5000, "all(" * 5000 + ")" * 5000, "any(" * 30 + "exact" + ")" * 30, "all()",
           "all(exact,)", ")(")  # fmt: skip

DEEP = (100, 300, 900, 980, 5000)


def random_value(rng, depth=0):
    how = rng.random()
    if how < 0.7 or depth > 3:
        return rng.choice(SCALARS)
    if how < 0.73:
        return f"{rng.choice(('deep', 'deeper'))} {rng.choice(DEEP)}"
    if how < 0.85:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(("kind", "size", "a", "\n")): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def places(value):
    """Every container of a preset with the keys it has."""
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        yield from ((value, key) for key in keys)
        for key in keys:
            yield from places(value[key])


def random_preset(rng):
    data = json.loads(json.dumps(GOOD))
    if rng.random() < 0.5:
        data["drafter"] = rng.choice(data["drafter"])
    for _ in range(rng.choice((1, 1, 2, 4))):
        where = list(places(data))
        container, key = rng.choice(where) if where else (data, "format")
        how = rng.random()
        if how < 0.75:
            container[key] = random_value(rng)
        elif how < 0.85:
            del container[key]
        elif isinstance(container, dict):
            container[rng.choice(("kind", "model_path", "n_thread", "tail", ""))] = random_value(rng)
    return data


def written(data):
    text = json.dumps(data)
    for n in DEEP:  # deeper than the library writes
        text = text.replace(f'"deep {n}"', "[" * n + "]" * n).replace(f'"deeper {n}"', '{"a":' * n + "1" + "}" * n)
    return text


def test_random_presets(cases, tmp_path):
    path, copy = tmp_path / "p.json", tmp_path / "copy.json"
    n_read = n_refused = 0
    for seed in cases(700):
        rng = random.Random(seed)
        data = written(random_preset(rng)).encode()
        if rng.random() < 0.15:
            changed = bytearray(data)
            for _ in range(rng.choice((1, 3))):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            data = bytes(changed)
        path.write_bytes(data)
        try:
            preset = load_preset(path)
        except PresetError as error:
            assert "\n" not in str(error)
            assert str(path) in str(error)
            n_refused += 1
            continue
        n_read += 1
        preset.arguments()
        save_preset(preset, copy, force=True)
        again = load_preset(copy)
        assert again.decoding == preset.decoding
    n = n_read + n_refused
    assert n < 50 or min(n_read, n_refused) > n / 20  # they are not all of one kind
