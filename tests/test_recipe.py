"""The recipe of the tiny models: texts, errors, export; with PyTorch also whole runs on models still tinier."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from recipe import cli, corpus, shapes, windows
from recipe.errors import RecipeError
from recipe.folder import FILES, PARTS, Folder

from pyfly_cpp.heads import export

TESTS = Path(__file__).parent
TINY = TESTS.parent / "models" / "tiny"

# ---- Text ------------------------------------------------------------------------------------------------------------


def test_a_blank_line_ends_a_document():
    assert corpus.split_documents("one\ntwo\n\nthree\n \n\nfour\n") == ["one\ntwo", "three", "four"]
    assert corpus.split_documents("one\r\n\r\ntwo") == ["one", "two"]
    questions = "Question: a\n\nAnswer: b\nc\n\nd\n\nQuestion: e\nAnswer: f\n\n"
    assert corpus.split_documents(questions) == ["Question: a\n\nAnswer: b\nc\n\nd", "Question: e\nAnswer: f"]
    assert corpus.split_documents(" \n\n") == []


def test_gsm8k_rows_lose_the_marks_of_the_calculator():
    row = {"question": " How many?", "answer": "2*3=<<2*3=6>>6 in all.\n#### 6"}
    expected = "Question: How many?\nAnswer: 2*3=6 in all.\n#### 6"
    assert corpus.gsm8k_documents(f"{json.dumps(row)}\n\n", "x") == [expected]
    assert corpus.as_chat(expected) == (
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n2*3=6 in all.\n#### 6<|im_end|>\n"
    )
    assert corpus.as_chat("No question.") is None


def test_the_last_documents_are_held_back(text_file):
    read = corpus.read_corpus(text_file, None, None)
    assert len(read.training) == 190
    assert len(read.held_back) == len(read.prompts) == 10
    assert read.held_back[0] not in read.training
    assert all(document.startswith(prompt) for document, prompt in zip(read.held_back, read.prompts))


def test_windows_begin_with_documents_and_depend_on_the_seed():
    documents = [np.full(length, length) for length in (40, 90, 300)]
    first, second = windows.batches(documents, 2, seed=3)
    assert first.shape == (windows.N_BATCH, shapes.N_WINDOW + 1)
    for window in (*first, *second):
        changes = np.flatnonzero(np.diff(window)) + 1
        pieces = np.split(window, changes)
        assert all(len(piece) % piece[0] == 0 for piece in pieces[:-1])
    assert np.array_equal(first, next(windows.batches(documents, 1, seed=3)))
    assert not np.array_equal(first, next(windows.batches(documents, 1, seed=4)))


# ---- Errors ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    """200 documents of made-up words."""
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, size=rng.integers(2, 7))) for _ in range(3000)]
    documents = ["Question: {} {}?\nAnswer: {} {} {}.".format(*rng.choice(words, 5)) for _ in range(200)]
    documents = [f"{document} {' '.join(rng.choice(words, 30))}" for document in documents]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(documents), encoding="utf-8")
    return path


def test_a_folder_that_does_not_fit_is_refused(tmp_path, text_file):
    read = corpus.read_corpus(text_file, None, None)
    folder = Folder(tmp_path / "out")
    with pytest.raises(RecipeError, match=r"draft is trained on target, .*target\.pt is not there; train it first"):
        folder.prepare(read, 0, ["draft"], force=False)
    folder.prepare(read, 0, PARTS, force=False)
    folder.weights("target").write_bytes(b"")
    folder.prepare(read, 0, ["draft"], force=False)
    with pytest.raises(RecipeError, match=r"target\.pt is there already; give --force"):
        folder.prepare(read, 0, ["target"], force=False)
    folder.prepare(read, 0, ["target"], force=True)
    folder.weights("draft").write_bytes(b"")
    with pytest.raises(RecipeError, match=r"draft\.pt was trained on the target that is to be replaced"):
        folder.prepare(read, 0, ["target"], force=True)
    with pytest.raises(RecipeError, match="made from another text or seed"):
        folder.prepare(read, 1, ["target", "draft"], force=True)
    folder.prepare(read, 1, PARTS, force=True)
    with pytest.raises(RecipeError, match="cannot write to"):
        Folder(text_file / "out").prepare(read, 0, PARTS, force=False)


def test_it_starts_by_its_path(tmp_path):
    command = [sys.executable, TESTS.parent / "models" / "recipe", "--corpus", tmp_path / "none.txt", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("recipe: cannot read")


# ---- Export ----------------------------------------------------------------------------------------------------------


def test_the_turned_rows_give_the_same_attention():
    n_heads, head_dim, n_in, n_rows = 2, 8, 6, 5
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, n_heads * head_dim, n_in))
    x = rng.normal(size=(n_rows, n_in))
    angle = np.arange(n_rows)[:, None] * 0.3 ** np.arange(head_dim // 2)
    turn = np.exp(1j * angle)[:, None]

    def scores(matrices, first, second):
        turned = [(x @ m.T).reshape(n_rows, n_heads, head_dim) for m in matrices]
        turned = [(t[..., first] + 1j * t[..., second]) * turn for t in turned]
        return np.einsum("ihd,jhd->hij", turned[0], turned[1].conj()).real

    halves = scores([q, k], slice(None, head_dim // 2), slice(head_dim // 2, None))
    pairs = scores([export.adjacent_pairs(m, n_heads) for m in (q, k)], slice(0, None, 2), slice(1, None, 2))
    assert np.allclose(halves, pairs)


@pytest.mark.parametrize(
    ("part", "architecture", "shape"),
    [
        ("target", "llama", shapes.TARGET),
        ("draft", "llama", shapes.DRAFT),
        ("eagle3", "eagle3", shapes.EAGLE3),
        ("mtp", "qwen35", shapes.QWEN35),
        ("dflash", "dflash", shapes.DFLASH),
        ("dspark", "dflash", shapes.DSPARK),
    ],
)
def test_metadata_are_those_of_the_files_in_models_tiny(part, architecture, shape):
    path = TINY / FILES[part]
    if not path.exists():
        pytest.skip(f"models/tiny/{path.name} is not in this checkout")
    fields = gguf.GGUFReader(path).fields
    found = {name.split(".", 1)[1]: fields[name].contents() for name in fields if name.startswith(f"{architecture}.")}
    expected = {name: np.float32(x).item() if isinstance(x, float) else x for name, x in shape.fields().items()}
    assert found == expected


# ---- With PyTorch ----------------------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    pytest.importorskip("tokenizers")
    return pytest.importorskip("torch")


@pytest.fixture
def tinier(torch, monkeypatch):
    """Shapes and batches that train a step in no time; all else is as it is."""
    small = {"n_embd": 64, "n_ff": 96, "n_head": 4, "n_head_kv": 2, "head_dim": 32, "n_rot": 32}
    monkeypatch.setattr(shapes, "TARGET", shapes.LlamaShape(**{**small, "n_layer": 3}))
    monkeypatch.setattr(shapes, "DRAFT", shapes.LlamaShape(**{**small, "n_layer": 1, "tied": True}))
    eagle3 = {**small, "n_embd_target": 64, "target_layers": (0, 1, 2)}
    monkeypatch.setattr(shapes, "EAGLE3", shapes.Eagle3Shape(**eagle3))
    block = {**small, "n_layer": 2, "target_layers": (0, 2), "block_size": 8}
    monkeypatch.setattr(shapes, "DFLASH", shapes.DFlashShape(**block))
    monkeypatch.setattr(shapes, "DSPARK", shapes.DFlashShape(**block, n_markov=16))
    monkeypatch.setattr(shapes, "QWEN35", shapes.Qwen35Shape(**{**small, "n_layer": 2, "n_rot": 8}))
    monkeypatch.setattr(windows, "N_BATCH", 2)
    from recipe import check

    monkeypatch.setattr(check, "N_TOKENS", 24)


@pytest.fixture
def rough(tinier, torch, monkeypatch):
    """Weights that nothing cancels in: norms are not 1, logits are not near 0."""
    from recipe import train

    def roughen(training, part, model, loss_of):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
                elif name in ("output.weight", "token_embd.weight"):
                    parameter.mul_(4)
        model.requires_grad_(False)

    monkeypatch.setattr(train, "_optimise", roughen)


def test_the_export_of_random_weights_agrees_with_pytorch(rough, text_file, tmp_path, capsys):
    assert cli.main(["--corpus", str(text_file), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("] check passed: ") == 7
    assert (tmp_path / "SHA256SUMS").read_text().count("\n") == len(FILES)


@pytest.mark.parametrize(
    ("part", "unturned", "failed"),
    [("target", True, "logits differ"), ("target,eagle3", False, "drafts are PyTorch's")],
)
def test_a_wrong_export_is_found(rough, text_file, tmp_path, capsys, monkeypatch, part, unturned, failed):
    turn = export.adjacent_pairs
    monkeypatch.setattr(export, "adjacent_pairs", lambda m, n: m if unturned or m.shape[1] == 128 else turn(m, n))
    assert cli.main(["--corpus", str(text_file), "--out", str(tmp_path), "--only", part]) == 1
    said = capsys.readouterr().out
    assert [failed in line for line in said.splitlines() if line.startswith("check FAILED: ")] == [True]


def test_the_same_seed_gives_the_same_files_part_by_part(tinier, text_file, tmp_path, capsys):
    def sums(name, *runs):
        for arguments in runs:
            scale = ["--steps-scale", "0.006", "--licence", "MIT"]
            assert cli.main(["--corpus", str(text_file), "--out", str(tmp_path / name), *scale, *arguments]) == 0
        return (tmp_path / name / "SHA256SUMS").read_text()

    at_once = sums("a", ["--only", "target,draft,qwen35,mtp,dspark"])
    assert at_once == sums("b", ["--only", "qwen35"], ["--only", "target"], ["--only", "draft,mtp,dspark"])
    assert at_once != sums("c", ["--only", "target,draft,qwen35,mtp,dspark", "--seed", "1"])


def test_the_delta_rule_in_chunks_is_that_of_single_tokens(torch):
    from recipe.qwen35 import delta_rule

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 150, 8)
    k = k / k.norm(dim=-1, keepdim=True)
    g, beta = -torch.rand(2, 3, 150), torch.rand(2, 3, 150)
    state, rows = torch.zeros(2, 3, 8, 8), []
    for t in range(150):
        state = state * g[:, :, t, None, None].exp()
        missing = v[:, :, t] - (k[:, :, t, None] @ state)[:, :, 0]
        state = state + k[:, :, t, :, None] * (beta[:, :, t, None] * missing)[:, :, None]
        rows.append((q[:, :, t, None] @ state)[:, :, 0])
    assert torch.allclose(delta_rule(q, k, v, g, beta), torch.stack(rows, dim=2), atol=1e-5)
