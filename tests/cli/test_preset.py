"""`--preset` of chat and complete: what the file says is done, and what an option says goes before it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyfly_cpp import MTP, CrossVocabulary, DraftModel, Eagle3, FlyLlama, Margin, PromptLookup, Window
from pyfly_cpp.decoding import Decoding, presets
from pyfly_cpp.decoding.gates import GateNode
from pyfly_cpp.decoding.presets import SHIPPED, Preset, PresetError, load_preset, save_preset
from pyfly_cpp.decoding.resolve import Resolved, resolve_setting

from .conftest import DRAFT, HYBRID, TARGET

HEAD = TARGET.with_name("tiny-llama-eagle3-f16.gguf")

QUIET = ("--n-threads", 1, "--max-tokens", 24)


@pytest.fixture
def preset(tmp_path):
    """preset(**fields) -> path"""

    def write(**fields):
        path = tmp_path / "p.json"
        model = fields.pop("model", str(TARGET))
        save_preset(Preset(Decoding(**{"drafter": "none", **fields}), model), path, force=True)
        return path

    return write


def settings(run, *arguments):
    result = run("complete", "--raw", *QUIET, "--json", *arguments, "Natalia sold")
    assert result.code == 0, result.err
    return json.loads(result.out)


LOOSE = {
    "gate": Margin(0.5),
    "window": Window(4, "reconverge"),
    "draft_max": 5,
    "drafter": DraftModel(DRAFT, p_min=0.1),
}


def test_the_preset_is_followed(run, preset):
    path = preset(**LOOSE)
    said = settings(run, "--preset", path)
    got = said["settings"]
    assert (got["model"], got["gate"], got["window"]) == (str(TARGET), "margin:0.5", "reconverge:4")
    assert (got["draft_max"], got["drafter"], got["adaptive"]) == (5, [f"draft model {DRAFT.name}"], False)
    assert got["drafters"][0]["p_min"] == 0.1
    llm = FlyLlama.from_preset(path, n_ctx=2048, n_threads=1, n_threads_batch=1, verbose=False)
    assert said["text"] == llm.create_completion("Natalia sold", max_tokens=24, temperature=0.0)["choices"][0]["text"]
    assert said["stats"]["rounds"] == llm.stats.rounds, "the very same steps"
    llm.close()


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--gate", "exact"], "gate", "exact"),
        (["--gate", "stochastic"], "gate", "stochastic"),
        (["--gate", "rfsd-tv:0.1:20"], "gate", "rfsd-tv:0.1:20"),
        (["--window", 2], "window", "reconverge:2"),
        (["--window", "agree tail=1"], "window", "agree:4 tail=1"),
        (["--draft-max", 3], "draft_max", 3),
        (["--adaptive"], "adaptive", True),
        (["--model", HYBRID], "model", str(HYBRID)),
        (["--drafter", "none"], "drafter", []),
        (["--drafter", "lookup"], "drafter", ["prompt lookup"]),
        (["--draft", DRAFT, "--drafter", "both"], "drafter", ["prompt lookup", f"draft model {DRAFT.name}"]),
    ],
)
def test_options_go_before_it(run, preset, arguments, name, value):
    assert settings(run, "--preset", preset(**LOOSE), *arguments)["settings"][name] == value


def test_options_change_its_drafter(run, preset, tmp_path):
    path = preset(**{**LOOSE, "drafter": DraftModel(tmp_path / "moved.gguf", p_min=0.1)})
    (drafter,) = settings(run, "--preset", path, "--draft", DRAFT, "--p-min", 0.4)["settings"]["drafters"]
    assert (drafter["model_path"], drafter["p_min"]) == (str(DRAFT), 0.4)
    path = preset(drafter=CrossVocabulary(DraftModel(tmp_path / "moved.gguf")))
    (drafter,) = settings(run, "--preset", path, "--draft", DRAFT, "--p-min", 0.4)["settings"]["drafters"]
    draft = drafter["draft"]
    assert (drafter["kind"], draft["model_path"], draft["p_min"]) == ("cross", str(DRAFT), 0.4)
    path = preset(drafter=PromptLookup(3, 7))
    (drafter,) = settings(run, "--preset", path, "--num-pred-tokens", 9)["settings"]["drafters"]
    assert (drafter["max_ngram_size"], drafter["num_pred_tokens"]) == (3, 9)
    assert settings(run, "--preset", path, "--draft", DRAFT)["settings"]["drafter"] == [f"draft model {DRAFT.name}"]


def test_a_preset_without_a_window_takes_the_gates_own(run, preset, tmp_path):
    path = preset(**{**LOOSE, "window": None})
    assert json.loads(path.read_text())["window"] is None
    assert settings(run, "--preset", path)["settings"]["window"] == "agree:0"
    got = settings(run, "--preset", path, "--gate", "entropy:0.5", "--draft-max", 8)["settings"]
    assert got["window"] == "agree:6"
    assert settings(run, "--preset", path, "--window", 2)["settings"]["window"] == "agree:2"
    llm = FlyLlama.from_preset(path, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    assert llm.window == Window(0)
    llm.close()
    said = json.loads(path.read_text())
    del said["window"]
    path.write_text(json.dumps(said))
    assert load_preset(path).decoding.window is None
    path.write_text(json.dumps({**said, "window": {}}))
    assert load_preset(path).decoding.window == Window(), "one that was written stays"


def test_a_plain_preset(run, preset):
    path = preset(draft_max=0)
    said = settings(run, "--preset", path)
    assert said["settings"]["drafter"] == [] and said["stats"]["drafted"] == 0
    assert settings(run, "--preset", path, "--draft", DRAFT)["stats"]["drafted"] > 0


def test_a_head_in_a_preset(run, preset):
    said = settings(run, "--preset", preset(model=str(HYBRID), drafter=MTP(draft_max=2)))
    assert said["settings"]["drafter"] == ["MTP head"] and said["stats"]["drafted"] > 0


def test_chat(run, preset):
    result = run("chat", *QUIET, "--preset", preset(**LOOSE), stdin="How many apples?\n")
    assert result.code == 0 and result.out.strip()
    assert "gate: margin:0.5, window: " in result.err
    assert f"drafts: draft model {DRAFT.name}; " in result.err


DRAFTED = {"kind": "draft", "model_path": "draft.gguf"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafter": {**DRAFTED, "type_k": 9999}}, r"type_k must be a type that a KV cache can have.*not 9999"),
        ({"gate": "all(" * 5000 + "exact" + ")" * 5000}, "nested more than 32 deep"),
        ({"drafter": {"kind": []}}, r"'kind' must be one of draft, .*not \[\]"),
        ({"model": "a\0b"}, "'model' must be a path"),
        ({"model": "\ud800"}, "surrogates not allowed"),
        ({"drafter": {**DRAFTED, "model_path": "\0"}}, "needs 'model_path'"),
        ({"drafter": {**DRAFTED, "p_min": 10**400}}, r"p_min must be in \[0, 1\]"),
        ({"drafter": {"kind": "lookup", "texts": None}}, "texts must be a sequence of paths"),
        ({"drafter": {"kind": "lookup", "memory_file": ["a"]}}, "memory_file must be a path or None"),
        ({"drafter": {"kind": "lookup", "match": []}}, "must be 'latest' or 'earliest'"),
    ],
)
def test_fields_out_of_range(tmp_path, fields, message):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"format": 1, **fields}))
    with pytest.raises(PresetError, match=message) as caught:
        load_preset(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "deep",
    ["[" * 5000, '{"format": ' * 900 + "1" + "}" * 900, '{"format": 1, "gate": ' + "[" * 950 + "]" * 950 + "}"],
    ids=["lists", "objects", "in a field"],
)
def test_nested_too_deep(tmp_path, deep):
    path = tmp_path / "p.json"
    path.write_text(deep)
    with pytest.raises(PresetError, match=r"nested too deep|is not JSON|the format|must be a text"):
        load_preset(path)


# ---- Those that come with the package --------------------------------------------------------------------------------


def test_shipped_presets_are_files_that_say_what_they_rest_on():
    folder = Path(presets.__file__).with_name("shipped_presets")
    assert {path.stem for path in folder.iterdir()} == set(SHIPPED)
    for name in SHIPPED:
        preset = load_preset(name)
        assert preset == load_preset(folder / f"{name}.json")
        assert not preset.decoding.gate.is_lossless and preset.leaves_drafter and preset.model is None
        assert GateNode("exact_first", 8) in preset.decoding.gate.nodes(), "how an answer begins decides the rest"
        assert set(preset.claim) == {"about", "measured"}


FAST, PAPER = "all(margin:0.3,exact-first:8)", "all(entropy:0.3,exact-first:8)"


def test_a_shipped_preset_leaves_models_and_drafter_alone(run):
    got = settings(run, "--preset", "fast", "-m", TARGET, "-d", DRAFT)["settings"]
    assert (got["gate"], got["drafter"], got["adaptive"]) == (
        FAST,
        ["prompt lookup", f"draft model {DRAFT.name}"],
        True,
    )
    got = settings(run, "--preset", "fast", "-m", TARGET, "--draft-max", 2)["settings"]
    assert (got["gate"], got["draft_max"], got["drafter"]) == (
        FAST,
        2,
        ["prompt lookup", f"EAGLE-3 head {HEAD.name}"],
    )
    got = settings(run, "--preset", "fast", "-m", TARGET, "--gate", "exact")["settings"]
    assert (got["gate"], got["adaptive"]) == ("exact", True)
    result = run("chat", *QUIET, "-m", TARGET, "--preset", "fast", "--no-adaptive", stdin="How many apples?\n")
    assert result.code == 0 and f"gate: {FAST}, window: none" in result.err


def test_the_papers_preset_is_that_of_its_code(run):
    got = resolve_setting(load_preset("paper"))
    assert str(got) == f"{PAPER} agree:5 tail=6 k=15 no-adaptive"
    got = settings(run, "--preset", "paper", "-m", TARGET, "-d", DRAFT)["settings"]
    assert (got["gate"], got["draft_max"], got["adaptive"]) == (PAPER, 15, False)
    assert settings(run, "--preset", "paper", "-m", TARGET, "-d", DRAFT, "--adaptive")["settings"]["adaptive"]


def test_a_shipped_preset_in_python():
    llm = FlyLlama.from_preset("fast", model_path=str(TARGET), n_ctx=256, n_threads=1, verbose=False)
    assert (str(llm.gate), llm.window, llm.adaptive) == (FAST, Window(0), True)
    assert llm.resolved == Resolved((PromptLookup(), Eagle3(str(HEAD))), (PromptLookup(),)), "chosen for the model"
    llm.close()
    with pytest.raises(ValueError, match="the preset fast names no model"):
        FlyLlama.from_preset("fast")


def test_a_file_of_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("fast", "safe"):
        save_preset(Preset(Decoding(Margin(0.5), drafter="auto")), name)
    assert load_preset("fast").decoding.gate != Margin(0.5) == load_preset("./fast").decoding.gate
    assert load_preset("./fast") == load_preset("safe") == Preset(Decoding(Margin(0.5), drafter="auto"))
    with pytest.raises(PresetError, match=r"the preset fats cannot be read .* one of fast, paper\."):
        load_preset("fats")


def test_names_of_models_stay_names(tmp_path):
    for name in ("mydraft", "hf:me/repo:Q4_K_M", "ollama:llama3"):
        save_preset(Preset(Decoding(drafter=DraftModel(name)), name), tmp_path / "p.json", force=True)
        found = load_preset(tmp_path / "p.json")
        assert (found.model, found.decoding.drafter.model_path) == (name, name)
    (tmp_path / "mydraft").write_bytes(b"")
    save_preset(Preset(Decoding(drafter=DraftModel("mydraft")), "sub/m.gguf"), tmp_path / "p.json", force=True)
    found = load_preset(tmp_path / "p.json")
    assert found.model == str(tmp_path / "sub" / "m.gguf"), "a path is relative to the preset"
    assert found.decoding.drafter.model_path == str(tmp_path / "mydraft"), "so is a file that has a name"
