"""What drafts for a model: every combination of word, preset, draft, own head, files here, demo model and GPU, and what
is left of it for how somebody decodes. And how it decodes: every combination of preset, drafter and options."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import pytest

from pyfly_cpp import MTP, CrossVocabulary, DraftModel, Eagle3, PromptLookup
from pyfly_cpp.decoding import EXACT, Decoding
from pyfly_cpp.decoding import resolve as resolving
from pyfly_cpp.decoding.companions import Companion
from pyfly_cpp.decoding.gates import parse_gate
from pyfly_cpp.decoding.presets import Preset
from pyfly_cpp.decoding.resolve import AUTO, Resolved, resolve, resolve_setting
from pyfly_cpp.decoding.windows import parse_window
from pyfly_cpp.errors import IncompatibleDraftError

TINY = Path(__file__).parents[1] / "models" / "tiny"
PLAIN, HYBRID = TINY / "tiny-llama-target-f16.gguf", TINY / "tiny-qwen35-mtp-f16.gguf"
DRAFT, HEAD = str(TINY / "tiny-llama-draft-f16.gguf"), str(TINY / "tiny-llama-eagle3-f16.gguf")
NAMES = {DRAFT: "D", HEAD: "H", "preset.gguf": "P", "here.gguf": "F", "demo.gguf": "demo"}

AXES = {
    "word": (AUTO, "none", "lookup", "draft", "both", "cross", "mtp", "eagle3", "lookup+eagle3", "draft:D", "H"),
    "preset": ("", "draft", "lookup"),
    "draft": ("", "D", "H"),
    "own_head": (False, True),
    "file_here": (False, True),
    "demo": (False, True),
    "gpu": (False, True),
}
"""D: a draft model, H: a head, F: a file on this machine, P: the file that the preset names."""

NEEDS = {"draft": "a draft model", "both": "a draft model", "cross": "a draft model", "eagle3": "an EAGLE-3 head",
         "lookup+eagle3": "an EAGLE-3 head"}  # fmt: skip

TABLE = [
    ({"word": "none"}, "", None),
    ({"word": "lookup"}, "lookup", None),
    ({"word": "mtp", "draft": ""}, "mtp", None),
    *(({"word": word, "draft": ""}, f"{word} needs {noun}; write {word}:FILE", ValueError)
      for word, noun in NEEDS.items()),
    ({"word": "draft:D"}, "draft=D", None),
    ({"word": "H", "own_head": True}, "use the head of this very model", IncompatibleDraftError),
    ({"word": "H"}, "eagle3=H", None),
    *(({"word": word, "draft": file}, written.replace("FILE", file), None)
      for file in ("D", "H")
      for word, written in {"draft": "draft=FILE", "both": "lookup draft=FILE", "cross": "cross=FILE",
                            "mtp": "mtp=FILE", "eagle3": "eagle3=FILE", "lookup+eagle3": "lookup eagle3=FILE"}.items()),
    ({"preset": "draft", "draft": ""}, "draft=P", "the preset sets it"),
    ({"preset": "draft", "draft": "D"}, "draft=D", "the preset sets it"),
    ({"preset": "draft", "draft": "H"}, "draft=H", "the preset sets it"),
    ({"preset": "lookup", "draft": ""}, "lookup", "the preset sets it"),
    ({"own_head": True, "draft": "H"}, "use the head of this very model", IncompatibleDraftError),
    ({"own_head": True}, "mtp", "the model has an MTP head"),
    ({"draft": "D"}, "lookup? draft=D", "the model has no MTP head, and a draft was given"),
    ({"draft": "H"}, "lookup? eagle3=H", "the model has no MTP head, and a draft was given"),
    ({"file_here": True}, "lookup? draft=F", "the model has no MTP head, and here.gguf on this machine fits it at 10% "
     "of its size"),
    ({"demo": True, "gpu": False}, "lookup cross=demo?", "the model has no MTP head, and no file on this machine fits "
     "it as a draft; the demo model is far smaller"),
    ({}, "lookup", "the model has no MTP head, and no file on this machine fits it as a draft"),
]  # fmt: skip
"""The first row that fits a combination has its drafters, with a question mark behind what may be left out, and the
reason; or what the error tells."""


def written(resolved):
    out = []
    for one in resolved.drafters:
        file = "" if one.file is None else f"={NAMES[os.fspath(one.file)]}"
        out.append(f"{one.word}{file}{'?' if one in resolved.may_be_left_out else ''}")
    return " ".join(out)


@pytest.fixture
def machine(monkeypatch):
    """machine(file_here, demo, gpu): what there is besides the model."""

    def have(file_here=False, demo=False, gpu=False):
        here = [Companion(Path("here.gguf"), DraftModel("here.gguf"), 1, 0.1)] if file_here else []
        monkeypatch.setattr(resolving, "companions", lambda _: iter(here))
        monkeypatch.setattr(resolving, "embedded_model", lambda: Path("demo.gguf") if demo else None)
        monkeypatch.setattr(resolving, "default_gpus", lambda: ["a GPU"] if gpu else [])
        monkeypatch.setattr(resolving, "bytes_of_model", lambda path: 1 if "demo" in str(path) else 100)
        monkeypatch.setattr(resolving, "available", lambda: None)

    return have


def test_every_combination(machine):
    files = {"D": DRAFT, "H": HEAD}
    presets = {"": (), "draft": (DraftModel("preset.gguf"),), "lookup": (PromptLookup(3),)}
    used = set()
    for values in itertools.product(*AXES.values()):
        case = dict(zip(AXES, values))
        row = next(i for i, (when, *_) in enumerate(TABLE) if when.items() <= case.items())
        used.add(row)
        _, expected, reason = TABLE[row]
        machine(case["file_here"], case["demo"], case["gpu"])
        word = case["word"].replace("draft:D", f"draft:{DRAFT}").replace("H", HEAD)
        asked = HYBRID if case["own_head"] else PLAIN, word, files.get(case["draft"]), presets[case["preset"]]
        if isinstance(reason, type):
            with pytest.raises(reason, match=expected.replace("+", r"\+")):
                resolve(*asked)
            continue
        found = resolve(*asked)
        assert (written(found), found.reason) == (expected, reason), case
        needed = " ".join(part for part in expected.split() if not part.endswith("?"))
        for is_governed, n_requests, embeds in itertools.product((True, False), (1, 2), (False, True)):
            stays = is_governed and n_requests == 1 and not embeds
            assert written(found.kept(is_governed, n_requests, embeds)) == (expected if stays else needed), case
    assert used == set(range(len(TABLE)))


def test_what_was_resolved_or_given_as_drafters_stays(machine):
    machine(file_here=True)
    lookup, draft = PromptLookup(3), DraftModel(DRAFT, draft_max=5)
    found = resolve(PLAIN)
    assert resolve(HYBRID, found) is found
    assert resolve(PLAIN, [lookup, draft]) == Resolved((lookup, draft))
    assert resolve(PLAIN, None) == Resolved() and resolve(PLAIN, None, draft) == Resolved((draft,))
    assert resolve(PLAIN, draft=lookup) == Resolved((lookup,)), "prompt lookup is there already"
    assert resolve(PLAIN, draft=draft) == Resolved((PromptLookup(), draft), (PromptLookup(),))
    assert resolve(PLAIN, draft=len).drafters == (len,), "a callable may look up itself"
    with pytest.raises(ValueError, match="Did you mean 'mtp'"):
        resolve(PLAIN, "mpt")


def test_options_hold_of_all_that_is_made_here(machine):
    machine(demo=True)
    options = {"p_min": 0.5, "max_ngram_size": 3, "draft_n_ctx": 99}
    lookup = PromptLookup(3)
    assert resolve(PLAIN, options=options).drafters == (
        lookup, CrossVocabulary(DraftModel(Path("demo.gguf"), p_min=0.5, n_ctx=99)),
    )  # fmt: skip
    assert resolve(PLAIN).drafters[1].draft.n_ctx == 2048
    draft = DraftModel(DRAFT, p_min=0.5, n_ctx=99)
    assert resolve(PLAIN, "both", DRAFT, options=options).drafters == (lookup, draft)
    assert resolve(PLAIN, AUTO, DRAFT, options=options) == Resolved((lookup, draft), (lookup,))
    searched = resolve(PLAIN, AUTO, DRAFT, options={"lookup_texts": (__file__,)})
    assert searched == Resolved((PromptLookup(texts=(__file__,)), DraftModel(DRAFT))), "files to search are needed"
    preset = DraftModel("preset.gguf", p_min=0.1)
    assert resolve(PLAIN, AUTO, DRAFT, [preset], options).drafters == (DraftModel(DRAFT, p_min=0.1),)


def test_the_demo_model_is_far_smaller_and_leaves_memory_for_the_target(machine, monkeypatch):
    machine(demo=True)
    for share, free, is_there in [(0.01, 103, True), (0.01, 102, False), (0.009, None, False), (math.inf, None, True)]:
        monkeypatch.setattr(resolving, "MOST_SHARE_OF_DEMO", share)
        monkeypatch.setattr(resolving, "available", lambda free=free: free)
        assert written(resolve(PLAIN)) == ("lookup cross=demo?" if is_there else "lookup")


def test_lengths():
    lookup, draft = PromptLookup(), DraftModel(DRAFT, draft_max=5)
    found = Resolved((lookup, draft, len), (lookup,))
    assert found.lengths(None, True, 512) == [10, 5, 10]
    assert found.lengths(None, False, 512) == [0, 5, 10], "what may be left out drafts under the governor alone"
    assert found.lengths(3, True, 512) == [3, 3, 3] and found.lengths(None, True, 4) == [3, 3, 3]


def test_words_of_settings(machine):
    def of(resolved, setting):
        return written(resolved.of(Decoding.parse(setting)))

    machine(file_here=True)
    found = resolve(PLAIN)
    assert found.words() == ["draft", "lookup"], "a file that was found is there"
    assert of(found, "exact") == "lookup? draft=F" and of(found, "plain") == ""
    assert of(found, "exact k=4 draft") == "draft=F" and of(found, "exact lookup") == "lookup"
    assert of(found, "exact cross") == "cross=F", "of the draft model that is there"
    assert found.of(EXACT).drafters[0] == PromptLookup(memory=0) == found.of(EXACT).may_be_left_out[0]
    assert found.as_used(EXACT) == found, "with its memory"
    own = resolve(HYBRID, draft=DRAFT)
    assert own.words() == ["mtp", "draft", "lookup"] and of(own, "exact both") == "lookup draft=D"
    assert resolve(PLAIN, "eagle3", HEAD).words() == ["eagle3", "lookup"]
    assert of(resolve(PLAIN, "lookup", DRAFT), "exact draft") == "draft=D", (
        "a file is there if the word has no use for it"
    )
    both = Resolved((DraftModel(DRAFT, draft_max=3),), given=(MTP(draft_max=2),))
    assert both.of(Decoding.parse("exact mtp")).drafters == (MTP(draft_max=2),)
    assert both.of(Decoding(drafter=Eagle3(HEAD))).drafters == (Eagle3(HEAD),)
    with pytest.raises(ValueError, match="the setting 'exact eagle3' needs an EAGLE-3 head; write eagle3:FILE"):
        found.of(Decoding.parse("exact eagle3"))


# ---- How to decode ---------------------------------------------------------------------------------------------------

SAID = {
    "preset_gate": ("margin:0.3", "stochastic"),
    "preset_window": (None, "agree:3"),
    "preset_drafts": ("auto", "lookup", "none"),
    "word": (AUTO, "lookup", "none"),
    "draft": (None, "D"),
    "gate": (None, "exact", "stochastic", "entropy:0.3"),
    "words": (None, "tail=2", "agree:5"),
    "draft_max": (None, 0, 4),
    "adaptive": (None, True),
}
"""A preset with `draft_max` 7, and what is said besides."""

FIELDS = {
    "gate": [*(({"gate": gate}, gate) for gate in SAID["gate"][1:]), *(({"preset_gate": gate}, gate)
             for gate in SAID["preset_gate"])],
    "window": [
        ({"gate": "stochastic", "words": None}, None),
        ({"gate": None, "preset_gate": "stochastic", "words": None}, None),
        ({"words": None, "preset_window": None}, None),
        ({"words": None}, "agree:3"),
        ({"words": "agree:5"}, "agree:5"),  # all of the window's own words
        ({"preset_window": "agree:3", "preset_gate": "margin:0.3"}, "agree:3 tail=2"),
        ({"gate": None}, "agree:0 tail=2"),  # the gate's own, changed
        ({}, "agree:6 tail=2"),
    ],
    "draft_max": [({"draft_max": 0}, 0), ({"draft_max": 4}, 4), ({"preset_drafts": "none"}, None), ({}, 7)],
    "drafter": [({"word": "none"}, "none"), ({"preset_drafts": "none", "word": AUTO, "draft": None}, "none"),
                ({}, None)],
    "adaptive": [({"adaptive": True}, True), ({"preset_drafts": "auto"}, True), ({}, False)],
}  # fmt: skip
"""For each field of the setting its sources: the first row that fits a combination has its value."""


def test_the_precedence_of_what_is_said_and_a_preset():
    used = set()
    for values in itertools.product(*SAID.values()):
        case = dict(zip(SAID, values))
        draws = "stochastic" in (case["gate"], case["gate"] or case["preset_gate"])
        if case["preset_gate"] == "stochastic" and case["preset_window"]:
            continue  # no preset is so: the gate has no use for a window
        preset = Preset(Decoding(case["preset_gate"], case["preset_window"], 7, case["preset_drafts"]))
        said = {"gate": case["gate"], "draft_max": case["draft_max"], "adaptive": case["adaptive"]}
        asked = preset, case["word"], case["draft"], case["words"]
        if draws and case["words"]:
            with pytest.raises(ValueError, match="window"):
                resolve_setting(*asked, **said)
            continue
        found = vars(resolve_setting(*asked, **said))
        for name, rows in FIELDS.items():
            row = next(i for i, (when, _) in enumerate(rows) if when.items() <= case.items())
            used.add((name, row))
            value = rows[row][1]
            read = {"gate": parse_gate, "window": parse_window}.get(name)
            assert found[name] == (read(value) if read and value else value), (name, case)
    assert used == {(name, i) for name, rows in FIELDS.items() for i in range(len(rows))}


def test_a_setting_without_a_preset():
    assert resolve_setting() == Decoding() and resolve_setting(drafter="none") == Decoding(drafter="none")
    assert resolve_setting(gate="margin:0.3", window_words="4").window == parse_window("agree:4")
    with pytest.raises(ValueError, match="draft_max"):
        resolve_setting(draft_max=-1)
