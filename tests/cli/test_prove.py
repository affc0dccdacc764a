"""`doctor --prove` on the command line: what it prints and writes, its exit codes, its errors."""

from __future__ import annotations

import json

import pytest
from described import make

from pyfly_cpp.cli import terminal

from .conftest import DRAFT, HYBRID, TARGET

FEW = ("-n", 4, "-c", 256, "-t", 1)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("Tom has 3 apples.\nOne two three one two three\n", encoding="utf-8")
    return path


def test_the_proof_of_a_model_and_its_draft(run, prompts, tmp_path):
    page = tmp_path / "proof.html"
    result = run("doctor", TARGET, "-d", DRAFT, "--prove", "--prompts", prompts, "-o", page, "--json", *FEW)
    report = json.loads(result.out)
    proof = report["proof"]
    assert result.code == (0 if proof["is_exact"] else 1) and report["draft_fits"]
    assert {"prompt lookup", "draft", "saved and restored", "8 requests"} <= {way["name"] for way in proof["ways"]}
    assert proof["n_answers"] == 2 and proof["verdict"] in page.read_text(encoding="utf-8")
    again = run("doctor", TARGET, "--prove", "--prompts", prompts, "-o", page, *FEW)
    assert again.code == 1 and "--force" in again.err
    shown = run("doctor", "-m", TARGET, "--prove", "--prompts", prompts, "-o", tmp_path / "proof.json", *FEW)
    written = json.loads((tmp_path / "proof.json").read_text(encoding="utf-8"))
    assert shown.out.splitlines()[-1] == written["proof"]["verdict"]
    assert written["files"]["model"]["file"] == TARGET.name


def test_it_tells_how_far_it_is_without_a_terminal(run, prompts, monkeypatch):
    monkeypatch.setattr(terminal, "EVERY", 0.0)
    lines = run("doctor", TARGET, "--prove", "--prompts", prompts, "--json", *FEW).err.splitlines()
    assert {f"loading {TARGET.name}: 0%", "proof, plain: 1 of 2", "proof, batches: 32 of 32"} <= {*lines}


def test_a_model_with_a_head_drafts_with_it(run, prompts):
    ways = json.loads(run("doctor", HYBRID, "--prove", "--prompts", prompts, "--json", *FEW).out)["proof"]["ways"]
    head = next(way for way in ways if way["name"] == "MTP head")
    assert head["n"] == 2 and head["n_drafted"] > 0


def test_what_is_not_exact_has_exit_code_1(run, prompts, lora):
    result = run("doctor", TARGET, "--prove", "--prompts", prompts, "--lora", lora, *FEW)
    assert result.code == 1 and "LoRA" in result.out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--prove"], 2, "--model"),
        ([TARGET, "-o", "proof.html"], 2, "--prove"),
        ([TARGET, "--cache-type-k", "q8_0"], 2, "--cache-type-k"),
        ([TARGET, "--prove", "-o", "proof.txt"], 1, "proof.txt"),
        ([TARGET, "--prove", "--prompts", "none.txt"], 1, "none.txt"),
        ([TARGET, "--prove", "--lora", DRAFT], 1, DRAFT.name),
        (["none.gguf", "--prove"], 1, "none.gguf"),
    ],
)
def test_errors_name_what_is_wrong(run, arguments, code, named):
    result = run("doctor", *arguments)
    assert result.code == code and named in result.err


def test_there_are_twenty_prompts():
    from pyfly_cpp.cli.prove import N_PROMPTS, _prompts

    texts = _prompts(None)
    assert len(texts) == N_PROMPTS == 20 == len(set(texts.values()))


def test_a_graph_without_flash_attention_does_not_end_the_process(run, tmp_path):
    """llama.cpp fails an assertion if a context of this architecture has it."""
    widths = {"attention.kv_lora_rank": 32, "rope.dimension_count": 8, "attention.head_count_kv": 4}
    sizes = {"attention.key_length": 24, "attention.value_length": 16}
    path = make("plm", {**widths, **sizes}, tmp_path / "plm.gguf")
    result = run("doctor", path)
    assert result.code == 0 and "flash attention" in result.out
