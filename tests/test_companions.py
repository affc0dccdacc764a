"""What on this machine could draft for a model, and what is published."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_edit import edit_gguf, other_token, with_padding, without

from pyfly_cpp import (
    MTP,
    CrossVocabulary,
    DFlash,
    DraftModel,
    DSpark,
    Eagle3,
    FlyBatch,
    FlyLlama,
    PromptLookup,
    PyflyError,
)
from pyfly_cpp.cli import main, models_command
from pyfly_cpp.decoding import EXACT, PLAIN, Decoding, companions
from pyfly_cpp.decoding import resolve as resolving
from pyfly_cpp.decoding.resolve import Resolved, resolve
from pyfly_cpp.measure.loaded import load_generator
from pyfly_cpp.models import here
from pyfly_cpp.models.named import resolve_model
from pyfly_cpp.models.pairs import PAIRS, published_pair

TINY = Path(__file__).parents[1] / "models" / "tiny"
EAGLE3 = TINY / "tiny-llama-eagle3-f16.gguf"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A machine without models."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "LLAMA_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setenv("PYFLY_MODELS", str(home / "models"))
    return home


@pytest.fixture
def target(tmp_path, tiny_target):
    folder = tmp_path / "beside"
    folder.mkdir()
    return Path(shutil.copy(tiny_target, folder / "target.gguf"))


def found(target):
    return [(one.path.name, type(one.drafter)) for one in companions.companions(target)]


def put(source, *places):
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)


def test_nothing_there(target):
    assert found(target) == []


def test_a_user_without_a_home(target, tiny_draft, home, monkeypatch):
    """As that of a service may be."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert found(target) == []
    put(tiny_draft, home / "own" / "draft.gguf")
    monkeypatch.setenv("LLAMA_CACHE", str(home / "own"))
    assert found(target) == [("draft.gguf", DraftModel)]


def test_folders_that_cannot_be_read_are_passed_over(target, tiny_draft, home, monkeypatch):
    put(tiny_draft, home / "models" / "draft.gguf")
    for variable in ("HF_HUB_CACHE", "LLAMA_CACHE", "OLLAMA_MODELS"):
        monkeypatch.setenv(variable, str(home / ("n" * 300)))
    assert found(target) == [("draft.gguf", DraftModel)]
    assert "draft" in [one.name for one in here.models_here()]
    monkeypatch.setenv("PYFLY_MODELS", str(home / ("n" * 300)))
    assert found(target) == []
    with pytest.raises(ValueError, match="no known model 'draft'"):
        resolve_model("draft")
    with pytest.raises(ValueError, match="no known model"):
        resolve_model("n" * 300)


@pytest.mark.skipif(sys.platform == "darwin", reason="llama.cpp's folder is another one there")
def test_caches_of_other_programs_are_where_the_user_keeps_caches(home, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    assert {home / "cache" / "huggingface" / "hub", home / "cache" / "llama.cpp"} <= set(here.places())
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert Path("~/hf/hub").expanduser() in here.places()
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(home / "local"))
    assert home / "local" / "llama.cpp" in here.places()


@pytest.mark.parametrize(
    "given",
    [
        {"HUGGINGFACE_HUB_CACHE": "/old"},
        {"HF_HUB_CACHE": "$ROOT/hub"},
        {"HF_HUB_CACHE": "/new", "HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/home"},
        {"HF_HOME": "~/$ROOT/hf"},
        {"XDG_CACHE_HOME": "/caches/$ROOT"},
        {},
    ],
    ids=str,
)
def test_the_cache_of_the_hub_is_where_huggingface_hub_has_it(monkeypatch, given):
    pytest.importorskip("huggingface_hub")
    monkeypatch.undo()
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**given, "ROOT": "somewhere"}.items():
        monkeypatch.setenv(name, value)
    code = "from huggingface_hub import constants\nprint(constants.HF_HUB_CACHE, end='')"
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert Path(theirs) in here.places()


def test_beside_the_model(target, tiny_draft):
    put(tiny_draft, target.parent / "a-draft.gguf")
    put(EAGLE3, target.parent / "head.gguf")
    assert found(target) == [("head.gguf", Eagle3), ("a-draft.gguf", DraftModel)]
    chosen = resolve(target)
    head = Eagle3(target.parent / "head.gguf")
    assert chosen == Resolved((PromptLookup(), head), (PromptLookup(),))
    assert "head.gguf next to it fits it at 22% of its size" in chosen.reason
    for arguments, drafters in [({}, chosen.drafter), ({"draft_max": 2}, head), ({"adaptive": False}, head)]:
        with FlyLlama(target, drafter="auto", n_ctx=256, n_threads=1, verbose=False, **arguments) as llm:
            assert llm.drafter == drafters


def test_where_programs_keep_models(target, home, tiny_draft):
    places = [
        home / "models" / "ours.gguf",
        home / ".cache" / "huggingface" / "hub" / "models--o--r" / "snapshots" / "c0" / "hub.gguf",
        home / ".lmstudio" / "models" / "o" / "r" / "studio.gguf",
    ]
    put(tiny_draft, *places)
    put(EAGLE3, home / "models" / "head.gguf")  # not beside the model: perhaps of another one
    assert sorted(name for name, _ in found(target)) == ["hub.gguf", "ours.gguf", "studio.gguf"]


def test_what_fits_is_found_among_many_files(target, home, tiny_draft):
    """A head next to the model, and the sizes that promise most elsewhere."""
    put(EAGLE3, target.parent / "head.gguf")
    put(tiny_draft, home / "models" / "z.gguf")
    for i in range(companions._MOST_FILES):
        with open(home / "models" / f"{i}.gguf", "wb") as file:
            file.truncate(target.stat().st_size // 100)
    assert sorted(found(target)) == [("head.gguf", Eagle3), ("z.gguf", DraftModel)]


def test_the_share_nearest_to_a_tenth_first(target, tiny_draft):
    put(tiny_draft, target.parent / "a.gguf")
    edit_gguf(tiny_draft, target.parent / "b.gguf", {"general.description": "x" * 400_000})
    put(target, target.parent / "copy.gguf")  # as large as the target
    assert found(target) == [("a.gguf", DraftModel), ("b.gguf", DraftModel)]
    os.symlink(target.parent / "b.gguf", target.parent / "c.gguf")  # each file once
    assert len(found(target)) == 2


def test_what_does_not_fit(target, home, tiny_draft, tiny_qwen35, smollm2):
    folder = target.parent
    edit_gguf(tiny_draft, folder / "texts.gguf", other_token(tiny_draft, "pyfly"))
    edit_gguf(tiny_draft, folder / "padded.gguf", *with_padding(tiny_draft, 129))
    edit_gguf(tiny_draft, folder / "embeddings.gguf", {"llama.pooling_type": 1})
    edit_gguf(EAGLE3, folder / "narrow.gguf", {"eagle3.target_hidden_size": 128})
    edit_gguf(TINY / DFLASH, folder / "narrow-dflash.gguf", {"dflash.embedding_length": 128})
    edit_gguf(tiny_draft, folder / "lacking.gguf", tensors=without("blk.0.attn_q.weight"))
    (folder / "cut.gguf").write_bytes(Path(tiny_draft).read_bytes()[:1000])
    (folder / "empty.gguf").write_bytes(b"")
    os.symlink(folder / "nothing", folder / "dangling.gguf")
    put(tiny_draft, folder / "part-00002-of-00002.gguf")
    assert found(target) == []
    edit_gguf(tiny_draft, folder / "fits.gguf", *with_padding(tiny_draft, 128))
    assert found(target) == [("fits.gguf", DraftModel)]


# ---- The demo model beside lookup ------------------------------------------------------------------------------------


@pytest.fixture
def demo(smollm2, monkeypatch):
    """Small enough for any target."""
    monkeypatch.setattr(resolving, "MOST_SHARE_OF_DEMO", math.inf)
    monkeypatch.setattr(resolving, "default_gpus", list)
    return CrossVocabulary(DraftModel(Path(smollm2), n_ctx=2048))


def test_the_demo_model_drafts_beside_lookup_where_the_governor_chooses(demo, target):
    lookup = PromptLookup()
    assert resolve(target) == Resolved((lookup, demo), (demo,))
    for arguments, drafters in [
        ({}, (lookup, demo)),
        ({"adaptive": True, "draft_max": 4}, (lookup, demo)),
        ({"draft_max": 4}, lookup),
        ({"adaptive": False}, lookup),
    ]:
        with FlyLlama(target, drafter="auto", n_ctx=256, n_threads=1, verbose=False, **arguments) as llm:
            assert llm.drafter == drafters


def test_the_demo_model_drafts_for_its_own_family(smollm2, tmp_path, monkeypatch):
    monkeypatch.setattr(companions, "MOST_SHARE", math.inf)
    target = Path(shutil.copy(smollm2, tmp_path / "larger.gguf"))
    assert resolve(target).drafters == (PromptLookup(), DraftModel(Path(smollm2)))


def test_no_vocabulary_is_read_for_a_demo_model_of_another_architecture(smollm2, tiny_qwen35, tmp_path, monkeypatch):
    monkeypatch.setattr(companions, "MOST_SHARE", math.inf)
    monkeypatch.setattr(companions, "open_metadata", None)
    assert found(Path(shutil.copy(tiny_qwen35, tmp_path / "target.gguf"))) == []


def test_with_the_demo_model_answers_are_the_same(demo, target):
    options = {"n_ctx": 256, "n_threads": 1, "verbose": False}
    request = {"max_tokens": 24, "temperature": 0.0}
    with FlyLlama(target, **options) as llm:
        expected = llm("Natalia sold clips", **request)["choices"][0]["text"]
    with FlyLlama(target, drafter="auto", **options) as llm:
        assert llm.drafter == (PromptLookup(), demo)
        assert llm("Natalia sold clips", **request)["choices"][0]["text"] == expected
        assert llm.loaded.draft_lengths(llm.decoding) == [10, 8]
        for decoding in (Decoding(adaptive=False), Decoding(draft_max=4)):
            llm.decoding = decoding
            assert llm.loaded.draft_lengths(decoding) == [10 if decoding.draft_max is None else 4, 0]
            assert llm("Natalia sold clips", **request)["choices"][0]["text"] == expected
        assert dict(llm.stats.accepted_by_drafter).get("cross-vocabulary", 0) == 0


@pytest.mark.parametrize("n", [1, 2])
def test_several_requests_do_without_the_demo_model(n, demo, target):
    with FlyBatch(target, n, drafter="auto", n_ctx=256, n_threads=1, verbose=False) as batch:
        assert batch.llama.drafter == ((PromptLookup(), demo) if n == 1 else PromptLookup())
        assert len(batch.complete(["Natalia sold"] * 3, max_tokens=4, temperature=0)) == 3


@pytest.mark.parametrize(
    ("settings", "n", "is_there"), [(["exact adaptive"], None, True), (["exact"], None, False), (["exact"], 2, False)]
)
def test_measuring_loads_the_demo_model_only_for_governed_settings(settings, n, is_there, demo, target):
    settings = [Decoding.parse(setting) for setting in settings]
    generator = load_generator(target, resolve(target), settings, n, n_ctx=256, n_threads=1, verbose=False)
    with contextlib.closing(generator.llm):
        assert generator.drafters.drafter == ((PromptLookup(), demo) if is_there else PromptLookup())


def test_settings_that_take_turns_keep_their_drafters(demo, target, monkeypatch):
    """So the governor goes on learning, as in a chat."""
    settings = [PLAIN, EXACT, Decoding.parse("exact adaptive")]
    generator = load_generator(target, resolve(target), settings, n_ctx=256, n_threads=1, verbose=False)
    with contextlib.closing(generator.llm):
        for setting in settings:
            generator.configure(setting)
        monkeypatch.setattr(generator.llm.loaded.decoder, "open_drafters", None)
        for setting in settings * 2:
            generator.configure(setting)


def test_a_demo_model_that_cannot_be_opened_is_left_out(demo, target, home):
    damaged = home / "models" / "smollm2-135m.gguf"
    damaged.parent.mkdir()
    damaged.write_bytes(Path(demo.file).read_bytes()[:1000])
    with FlyLlama(target, drafter="auto", n_ctx=256, n_threads=1, verbose=False) as llm:
        assert llm.drafter == PromptLookup()
        llm.drafter = both = [PromptLookup(), demo]
        with pytest.raises(ValueError, match=damaged.name):
            llm.drafter = Resolved((PromptLookup(), CrossVocabulary(DraftModel(damaged)), demo), (demo,))
        assert llm.drafter == both and llm.resolved == Resolved(tuple(both))


# ---- One verdict -----------------------------------------------------------------------------------------------------


def as_it_is(source):
    return {}, None


def padded(n):
    return lambda source: with_padding(source, n)


def with_fields(**fields):
    return lambda source: ({name.replace("__", "."): value for name, value in fields.items()}, None)


def with_tokens(*texts):
    return lambda source: (other_token(source, *texts), None)


def head_alone(source):
    """The MTP head of a model, as converters write it into a file of its own."""

    def edit(arrays):
        for name in [name for name in arrays if name.startswith("blk.") and not name.startswith("blk.4.")]:
            del arrays[name]

    return {}, edit


def foreign_head(source):
    return other_token(source, "pyfly"), head_alone(source)[1]


LLAMA, DRAFT, HYBRID = "tiny-llama-target-f16.gguf", "tiny-llama-draft-f16.gguf", "tiny-qwen35-mtp-f16.gguf"
BOS = {"tokenizer__ggml__bos_token_id": 1532}
DFLASH, DSPARK = "tiny-llama-dflash-f16.gguf", "tiny-llama-dspark-f16.gguf"
FITTING = {
    "a draft": (LLAMA, as_it_is, DRAFT, as_it_is, DraftModel),
    "a target that is padded": (LLAMA, padded(64), DRAFT, as_it_is, DraftModel),
    "a draft that is padded": (LLAMA, as_it_is, DRAFT, padded(128), DraftModel),
    "a token that is empty": (LLAMA, with_tokens(""), DRAFT, with_tokens(""), DraftModel),
    "another BOS, which nothing adds": (LLAMA, as_it_is, DRAFT, with_fields(**BOS), DraftModel),
    "a hybrid": (LLAMA, as_it_is, HYBRID, as_it_is, DraftModel),
    "an EAGLE-3 head": (LLAMA, as_it_is, EAGLE3.name, as_it_is, Eagle3),
    "a DFlash head": (LLAMA, as_it_is, DFLASH, as_it_is, DFlash),
    "a DSpark head": (LLAMA, as_it_is, DSPARK, as_it_is, DSpark),
    "an MTP head": (HYBRID, as_it_is, HYBRID, head_alone, MTP),
}
UNFIT = {
    "a draft that is padded more": (LLAMA, as_it_is, DRAFT, padded(129), DraftModel),
    "another token": (LLAMA, as_it_is, DRAFT, with_tokens("pyfly"), DraftModel),
    "an empty one in place of a token": (LLAMA, as_it_is, DRAFT, with_tokens(""), DraftModel),
    "another BOS": (
        LLAMA, as_it_is, DRAFT, with_fields(**BOS, tokenizer__ggml__add_bos_token=True), DraftModel),
    "a model of embeddings": (LLAMA, as_it_is, DRAFT, with_fields(llama__pooling_type=1), DraftModel),
    "an EAGLE-3 head without the padding": (LLAMA, padded(64), EAGLE3.name, as_it_is, Eagle3),
    "a DSpark head without a mask token": (
        LLAMA, as_it_is, DSPARK, with_fields(tokenizer__ggml__mask_token_id=None), DSpark),
    "an MTP head of another architecture": (LLAMA, as_it_is, HYBRID, head_alone, MTP),
    "an MTP head of another vocabulary": (HYBRID, as_it_is, HYBRID, foreign_head, MTP),
}  # fmt: skip


OFTEN = {"a draft", "a target that is padded", "an EAGLE-3 head", "a DSpark head", "an MTP head", "another token",
         "a draft that is padded more", "another BOS", "an MTP head of another architecture"}  # fmt: skip


@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in (*FITTING, *UNFIT)]
)
def test_doctor_companions_and_the_loader_agree(name, tmp_path, capsys, monkeypatch):
    target, edit_target, draft, edit_draft, kind = {**FITTING, **UNFIT}[name]
    target = edit_gguf(TINY / target, tmp_path / "target.gguf", *edit_target(TINY / target))
    draft = edit_gguf(TINY / draft, tmp_path / "draft.gguf", *edit_draft(TINY / draft))
    fits = name in FITTING

    with pytest.raises(SystemExit) as left:
        main(["doctor", "--json", "-m", str(target), "-d", str(draft)])
    report = json.loads(capsys.readouterr().out)
    assert (report["draft_fits"], report["draft_word"]) == ((True, kind.word) if fits else (False, None))
    assert (left.value.code or 0) == (0 if fits else 1)

    monkeypatch.setattr(companions, "MOST_SHARE", 2.0)
    assert [one for _, one in found(target)] == ([kind] if fits else [])

    llm = FlyLlama(target, n_ctx=128, n_threads=1, verbose=False)
    with contextlib.closing(llm):
        if fits:
            llm.drafter = kind(draft)
        else:
            with pytest.raises((ValueError, PyflyError)) as refused:
                llm.drafter = kind(draft)
            assert report["draft_problem"].split(";")[0] == str(refused.value).split(";")[0]


def test_memory_is_left_for_the_target(target, tiny_draft, monkeypatch):
    put(tiny_draft, target.parent / "draft.gguf")
    n = (target.parent / "draft.gguf").stat().st_size
    monkeypatch.setattr(companions, "available", lambda: 2 * n - 1)
    assert found(target) == []
    monkeypatch.setattr(companions, "available", lambda: 2 * n)
    assert len(found(target)) == 1
    monkeypatch.setattr(companions, "available", lambda: 0)
    assert found(target) == []


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Qwen2.5-7B-Instruct-Q4_K_M.gguf", "Qwen2.5"),
        ("qwen2.5-coder-14b-instruct-q4_k_m-00001-of-00002.gguf", "Qwen2.5-Coder"),
        ("Qwen3-30B-A3B-Q4_K_M.gguf", "Qwen3"),
        ("Qwen3.5-9B-UD-Q4_K_XL.gguf", "Qwen3.5"),
        ("Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", "Llama 3.1, 3.2, 3.3"),
        ("Llama-3.3-70B-Instruct-Q4_K_M.gguf", "Llama 3.1, 3.2, 3.3"),
        ("google_gemma-3-27b-it-Q4_K_M.gguf", "Gemma 3"),
        ("mistralai_Mistral-Small-3.2-24B-Instruct-2506-Q4_K_M.gguf", "Mistral Small 3"),
        ("SmolLM2-1.7B-Instruct.Q4_K_M.gguf", "SmolLM2"),
        ("Qwen2.5-0.5B-Instruct-Q8_0.gguf", None),
        ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "Qwen2.5-Coder"),
        ("Qwen3-0.6B-Q8_0.gguf", None),
        ("my-model.gguf", None),
        ("qwen2.5-coder:7b", "Qwen2.5-Coder"),
        ("llama3.1:8b", "Llama 3.1, 3.2, 3.3"),
        ("gemma3-4b", "Gemma 3"),
    ],
)
def test_published_pairs(name, family):
    pair = published_pair(name)
    assert (pair and pair.family) == family


def test_the_command(target, tiny_draft, tiny_qwen35, capsys, monkeypatch):
    put(tiny_draft, target.parent / "draft.gguf")
    named = shutil.copy(target, target.parent / "Qwen3-8B-Q4_K_M.gguf")

    def run(*arguments):
        with pytest.raises(SystemExit) as e:
            main(["models", "pair", *map(str, arguments)])
        return e.value.code, *capsys.readouterr()

    draft = "hf:Qwen/Qwen3-0.6B-GGUF:Q8_0"
    assert f"{draft} (639.4 MB) is too large to draft for it: more than 50% of its size.\n" in run(named)[2]
    assert json.loads(run(named, "--json")[1])["published"] is None
    monkeypatch.setattr(models_command, "bytes_of_model", lambda path: 2 * 639446688)
    code, out, err = run(named)
    assert code == 0
    assert out.splitlines() == ["* draft.gguf   2.4 MB   22%  a draft model"]
    published = "Published draft for Qwen3 (639.4 MB, Apache-2.0):"
    assert f"{published}\n  pyfly-cpp models fetch {draft}" in err
    shown = json.loads(run(named, "--json")[1])
    assert shown["here"][0]["path"] == str(target.parent / "draft.gguf")
    assert shown["published"]["family"] == "Qwen3"
    assert not shown["mtp_head"]
    assert "* the model's own MTP head" in run(tiny_qwen35)[1]
    code, _, err = run(target.parent / "none.gguf")
    assert code == 1 and "there is no model file" in err
    assert "\n  for hf:Qwen/Qwen3-8B-GGUF\n" in run()[1]
    assert {one["family"] for one in json.loads(run("--json")[1])} == {pair.family for pair in PAIRS}


LOOK = """
import sys
from pathlib import Path
from pyfly_cpp.decoding.companions import companions
print(len(list(companions(Path(sys.argv[1])))))
"""


def test_a_look_at_files_prints_nothing_of_llama_cpp(target, tiny_draft):
    """Also before a first model is loaded, while llama-cpp-python prints everything."""
    shutil.copy(tiny_draft, target.parent)
    done = subprocess.run([sys.executable, "-c", LOOK, str(target)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1\n", "")
