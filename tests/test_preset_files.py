"""Presets: what a file says, and what is wrong in one."""

from __future__ import annotations

import pytest

from pyfly_cpp import DraftModel, Eagle3, Entropy, Exact, FlyLlama, Margin, PromptLookup, Stochastic, Window
from pyfly_cpp.decoding import Decoding
from pyfly_cpp.decoding.presets import Preset, PresetError, load_preset, save_preset
from pyfly_cpp.machine.files import OutputError

PRESETS = [
    Preset(),
    Preset(Decoding(Margin(0.3), Window(rule="reconverge"), 8, PromptLookup(3, 7)), None, {"n_prompts": 8}),
    Preset(Decoding(drafter=(PromptLookup(), Eagle3("/m/head.gguf", p_min=0.1)), adaptive=True)),
    Preset(Decoding(Entropy(0.3, top=None), Window(2, "reconverge", tail=1, across_rounds=False), None,
                    DraftModel("/m/draft.gguf", p_min=0.2)), "/m/target.gguf"),
]  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_read_back(preset, tmp_path):
    save_preset(preset, tmp_path / "p.json")
    assert load_preset(tmp_path / "p.json") == preset


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "format 'list'"),
        ('{"format": 2}', "format 2"),
        ('{"format": 1, "gat": "exact"}', "Did you mean 'gate'"),
        ('{"format": 1, "drafter": {"kind": "mpt"}}', "must be one of draft, lookup, cross, mtp"),
        ('{"format": 1, "drafter": {"kind": "cross"}}', "needs 'draft', itself a drafter"),
        ('{"format": 1, "drafter": {"kind": "cross", "draft": {"kind": "lookup"}}}', "takes a DraftModel"),
        ('{"format": 1, "drafter": {"kind": "cross", "draft": 3}}', "'kind' must be one of"),
        ('{"format": 1, "drafter": [{"kind": "lookup"}, {"kind": "eagle3"}]}', "needs 'model_path'"),
        ('{"format": 1, "drafter": "lookup"}', "an object with its 'kind', a list of them, \"auto\" or null"),
        ('{"format": 1, "drafter": []}', "'kind' must be one of"),
        ('{"format": 1, "drafter": {"kind": "lookup", "match": "first"}}', "must be 'latest' or 'earliest'"),
        ('{"format": 1, "model": 1}', "'model' must be a path"),
    ],
)
def test_wrong_presets(text, message, tmp_path):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(PresetError, match=message):
        load_preset(tmp_path / "p.json")


def test_presets_overwrite_nothing(tmp_path):
    path = tmp_path / "p.json"
    save_preset(PRESETS[1], path)
    with pytest.raises(OutputError, match="--force"):
        save_preset(PRESETS[0], path)
    assert load_preset(path) == PRESETS[1]
    save_preset(PRESETS[0], path, force=True)
    assert load_preset(path) == PRESETS[0]
    with pytest.raises(PresetError, match="cannot be read"):
        load_preset(tmp_path / "none.json")


def test_from_preset(tiny_target, tiny_draft, tmp_path):
    target, draft = tiny_target, tiny_draft
    save_preset(
        Preset(Decoding(Margin(0.5), Window(rule="reconverge"), 4, DraftModel(str(draft))), str(target)),
        tmp_path / "p.json",
    )
    assert "n_gpu_layers" not in Preset().arguments()
    assert Preset(claim={"models": {"gpu_layers": -1}}).arguments()["n_gpu_layers"] == -1, "as it was measured"
    quiet = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    llm = FlyLlama.from_preset(tmp_path / "p.json", **quiet)
    assert (llm.gate, llm.window.rule, llm.draft_max, llm.drafter.model_path) == (
        Margin(0.5),
        "reconverge",
        4,
        str(draft),
    )
    llm.close()
    llm = FlyLlama.from_preset(tmp_path / "p.json", gate=Exact(), drafter=None, **quiet)
    assert llm.gate == Exact() and llm.drafter is None
    llm.close()
    llm = FlyLlama.from_preset(tmp_path / "p.json", gate="stochastic", **quiet)
    assert llm.gate == Stochastic() and llm.decoding.window is None, "which takes none"
    llm.close()
    llm = FlyLlama.from_preset(tmp_path / "p.json", gate="entropy:0.3", window="agree:2", **quiet)
    assert (llm.gate, llm.window) == (Entropy(0.3), Window(2))
    llm.close()
    for said, drafter, k in ((DraftModel(str(draft)), None, 0), ("none", f"draft:{draft}", 8), ("none", None, 0)):
        save_preset(Preset(Decoding(draft_max=0, drafter=said), str(target)), tmp_path / "p.json", force=True)
        llm = FlyLlama.from_preset(tmp_path / "p.json", **({} if drafter is None else {"drafter": drafter}), **quiet)
        assert llm.draft_max == k, "no draft of the preset's is none at all, and whoever names a drafter drafts"
        llm.close()
    save_preset(Preset(), tmp_path / "q.json")
    with pytest.raises(ValueError, match="names no model"):
        FlyLlama.from_preset(tmp_path / "q.json")
