"""Which files of a repository are which model: the table of pairs against what the hub answers."""

from __future__ import annotations

import pytest

pytest.importorskip("huggingface_hub")

from fake_hub import LISTINGS
from huggingface_hub.hf_api import ModelInfo

from pyfly_cpp.models import hub
from pyfly_cpp.models.hub import HubFile, HubName, choose, models_in, read_name
from pyfly_cpp.models.pairs import PAIRS, offers, published_pair

MB = 1_000_000


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """The hub answers as recorded, through huggingface_hub's own reading of it."""

    class Api:
        def model_info(self, repo, files_metadata, timeout):
            assert files_metadata and timeout > 0
            return ModelInfo(**LISTINGS[repo])

    monkeypatch.setattr("huggingface_hub.HfApi", Api)


def files(*names):
    return [HubFile(name, 1000 + i) for i, name in enumerate(names)]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:o/r", HubName("o/r")),
        ("hf:o/r:q4_k_m", HubName("o/r", None, "Q4_K_M")),
        ("hf:o/r:ud-q4_k_xl", HubName("o/r", None, "UD-Q4_K_XL")),
        ("hf:o/r:fp16", HubName("o/r", None, "F16")),
        ("hf:o/r/a/b-Q8_0.gguf", HubName("o/r", "a/b-Q8_0.gguf")),
    ],
)
def test_names(text, name):
    assert read_name(text) == name
    assert read_name(str(name)) == name


@pytest.mark.parametrize("text", ["hf:", "hf:o", "hf:o/", "hf:/r", "hf:o/r/", "hf:o/r:", "hf:o/:Q8_0", "hf:o/r:Q8_0/f"])
def test_what_is_no_name(text):
    with pytest.raises(ValueError, match="is written hf:OWNER/REPO:TYPE, such as hf:Qwen"):
        read_name(text)


@pytest.mark.parametrize(
    ("name", "type_"),
    [
        ("qwen2.5-0.5b-instruct-fp16.gguf", "F16"),
        ("Qwen3-30B-A3B-Q4_K_M.gguf", "Q4_K_M"),
        ("Qwen3.5-9B-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("Llama-3.2-1B-Instruct-Q4_0_8_8.gguf", "Q4_0_8_8"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("BF16/Qwen3.5-9B-BF16.gguf", "BF16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model.gguf", ""),
        ("Q4_K_M.gguf", "Q4_K_M"),
    ],
)
def test_types(name, type_):
    assert [model.type for model in models_in(files(name))] == [type_]


def test_what_is_a_model():
    shards = [f"Q4_K_M/m-Q4_K_M-0000{i}-of-00003.gguf" for i in (3, 1, 2)]
    found = models_in(
        files("README.md", "mmproj-F16.gguf", "m-imatrix.gguf", *shards, "m-Q8_0.gguf", "b-Q8_0-00001-of-00002.gguf")
    )
    assert [(model.type, model.name, len(model.files)) for model in found] == [
        ("Q8_0", "m-Q8_0.gguf", 1),
        ("Q4_K_M", "Q4_K_M/m-Q4_K_M-00001-of-00003.gguf", 3),
    ]
    assert [file.name for file in found[1].files] == sorted(shards) == hub.parts_of(shards[0])


def test_a_number_that_cannot_be_a_part_is_a_part_of_the_name():
    for name in ("m-00001-of-00000.gguf", "m-00000-of-00002.gguf", "m-00003-of-00002.gguf"):
        assert hub.parts_of(name) == [name] and [model.name for model in models_in(files(name))] == [name]


def test_what_a_name_means():
    found = models_in(files("m-Q4_0.gguf", "m-Q8_0.gguf", "m-Q2_K.gguf"))
    assert choose(HubName("o/r"), found).type == "Q8_0"  # the first of the usual ones
    assert choose(HubName("o/r", None, "Q2_K"), found).name == "m-Q2_K.gguf"
    assert choose(HubName("o/r", "m-Q4_0.gguf"), found).type == "Q4_0"
    assert choose(HubName("o/r"), models_in(files("m-Q2_K.gguf"))).type == "Q2_K"
    with pytest.raises(ValueError, match=r"o/r has no model of type Q6_K; there is Q4_0, Q8_0, Q2_K\."):
        choose(HubName("o/r", None, "Q6_K"), found)
    with pytest.raises(ValueError, match=r"o/r has no whole model 'n\.gguf'; there is Q4_0, "):
        choose(HubName("o/r", "n.gguf"), found)
    with pytest.raises(ValueError, match=r"has 2 models that this could mean: a-Q8_0.gguf, b-Q8_0.gguf; name the file"):
        choose(HubName("o/r", None, "Q8_0"), models_in(files("a-Q8_0.gguf", "b-Q8_0.gguf")))
    with pytest.raises(ValueError, match="there is no GGUF model in it"):
        choose(HubName("o/r", None, "Q8_0"), models_in(files("model.safetensors")))


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.draft], ids=lambda pair: pair.family)
def test_the_drafts_of_the_table(pair):
    name = read_name(pair.draft)
    listing = hub.ask(name.repo)
    model = listing.model(name)
    assert listing.name(model) == name
    assert len(model.files) == 1 and model.files[0].sha256 and model.size == pair.size
    licence = pair.licence.lower().replace(" ", "")
    assert licence.startswith(listing.licence) and listing.licence
    assert not listing.is_gated
    assert published_pair(model.name) is not pair


@pytest.mark.parametrize(
    ("target", "file", "n_files", "draft"),
    [
        ("hf:Qwen/Qwen2.5-7B-Instruct-GGUF", "qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", 2,
         "qwen2.5-0.5b-instruct-q8_0.gguf"),
        ("hf:Qwen/Qwen2.5-7B-Instruct-GGUF:F16", "qwen2.5-7b-instruct-fp16-00001-of-00004.gguf", 4,
         "qwen2.5-0.5b-instruct-q8_0.gguf"),
        ("hf:Qwen/Qwen3-8B-GGUF:q8_0", "Qwen3-8B-Q8_0.gguf", 1, "Qwen3-0.6B-Q8_0.gguf"),
        ("hf:bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", 1,
         "Llama-3.2-1B-Instruct-Q4_K_M.gguf"),
        ("hf:ggml-org/gemma-3-4b-it-GGUF:f16", "gemma-3-4b-it-f16.gguf", 1, "gemma-3-1b-it-Q4_K_M.gguf"),
        ("hf:bartowski/mistralai_Mistral-Small-3.1-24B-Instruct-2503-GGUF:bf16",
         "mistralai_Mistral-Small-3.1-24B-Instruct-2503-bf16/"
         "mistralai_Mistral-Small-3.1-24B-Instruct-2503-bf16-00001-of-00002.gguf", 2,
         "alamios_Mistral-Small-3.1-DRAFT-0.5B-Q4_K_M.gguf"),
        ("hf:HuggingFaceTB/SmolLM2-360M-Instruct-GGUF", "smollm2-360m-instruct-q8_0.gguf", 1,
         "SmolLM2-135M-Instruct-Q4_K_M.gguf"),
        ("hf:unsloth/Qwen3.5-9B-GGUF:UD-Q4_K_XL", "Qwen3.5-9B-UD-Q4_K_XL.gguf", 1, None),
        ("hf:Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf", 1, None),
    ],
)  # fmt: skip
def test_pairs(target, file, n_files, draft):
    found, published = offers(read_name(target))
    assert (found.model.name, len(found.model.files)) == (file, n_files)
    assert found.model.size == sum(part.size for part in found.model.files) > 100 * MB
    assert (published and published.model.name) == draft
    if published is not None:
        assert published.model.size < 0.5 * found.model.size


def test_the_repositories_of_the_table_belong_to_their_families():
    for pair in PAIRS:
        for repo in pair.targets:
            assert published_pair(repo) is pair
        if pair.draft is not None:
            assert published_pair(read_name(pair.draft).repo) is None


def test_terms_that_must_be_accepted(monkeypatch):
    monkeypatch.setitem(LISTINGS, "o/r", {**LISTINGS["Qwen/Qwen3-0.6B-GGUF"], "gated": "manual", "tags": []})
    listing = hub.ask("o/r")
    assert listing.is_gated and listing.licence == ""
