"""Descriptions of every architecture that llama.cpp can decode, made by llama.cpp's own generator of test models.

The generator is part of the source of llama-cpp-python, in the release that is installed; `PYFLY_LLAMA_CPP_SOURCE` may
name that source (a folder or the sdist), else pip downloads it. It is compiled here against the installed libraries,
and nothing of it is kept in this repository.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import gguf
from gguf_edit import edit_gguf
from weights import HERE

VARIABLE = "PYFLY_LLAMA_CPP_SOURCE"
_TEST = "tests/test-llama-archs.cpp"

_NO_TEXT = {  # what generates no text in a plain `Llama` either (encoders, diffusion models, parts of models), or is
    # not described by the generator
    *("bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert", "neo-bert"),
    *("nomic-bert", "nomic-bert-moe", "t5", "t5encoder", "wavtokenizer-dec", "dream", "llada", "llada-moe", "rnd1"),
    *("clip", "deepseek2-ocr", "dflash", "eagle3", "gemma4-assistant", "gptj", "graniteswitch"),
}
_RANKS = {f"attention.{name}_lora_rank": 32 for name in ("decay", "iclr", "value_residual_mix", "gate")}
_CHANGES = {  # of descriptions that are not those of the architecture's files
    "arwkv7": {**_RANKS, "token_shift_count": 1},
    "gemma4": {"attention.sliding_window_pattern": [1, 1, 1, 1, 0]},
    "rwkv6qwen2": {"token_shift_count": 1},
    "rwkv7": _RANKS,
}
_NEXTN = {  # architectures whose files may hold NextN blocks
    *("bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe", "glm5-next", "hy_v3"),
    *("mimo2", "qwen35", "qwen35moe", "qwen3next", "step35"),
}


class Missing(Exception):
    """The source or a compiler is not to be had; the message says why."""


def descriptions(folder: Path) -> list[Path]:
    """Writes a description of every model that generates text, such as deepseek2-moe.gguf, and of those with NextN
    blocks another, deepseek2-moe-mtp.gguf. Raises Missing."""
    raw = folder / "raw"
    raw.mkdir()
    subprocess.run([_compiled(folder), raw], check=True)
    paths = []
    for path in sorted(raw.iterdir()):
        name = path.stem.rpartition("-")[0]
        if name not in _NO_TEXT:
            paths.append(_changed(path, folder / path.name, name, _CHANGES.get(name, {})))
            if name in _NEXTN:
                paths.append(_changed(path, folder / f"{path.stem}-mtp.gguf", name, _CHANGES.get(name, {}), 1))
    return paths


def _changed(source: Path, destination: Path, name: str, changes: dict, n_nextn: int = 0) -> Path:
    changes = {f"{name}.{key}": value for key, value in changes.items()}
    if n_nextn:
        fields = gguf.GGUFReader(source).fields
        n = fields[f"{name}.block_count"].contents()
        for key, field in fields.items():  # one entry for each block; the first is one with attention
            value = field.contents()
            if isinstance(value, list) and len(value) == n and ".rope." not in key:
                changes[key] = value + value[:1] * n_nextn
        changes |= {f"{name}.block_count": n + n_nextn, f"{name}.nextn_predict_layers": n_nextn}
    return edit_gguf(source, destination, changes)


def _compiled(folder: Path) -> Path:
    root = source(folder)
    options = (f'-DGENERATOR="{root / _TEST}"', f"-I{HERE / 'include'}", f"-I{root / 'src'}")
    return compiled(root, HERE / "generator.cpp", folder / "generator", options)


def compiled(root: Path, program: Path, out: Path, options: Sequence[str] = ()) -> Path:
    """A program for llama.cpp `root`, against the installed libraries; returns `out`. Raises Missing."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise Missing("there is no C++ compiler")
    spec = find_spec("llama_cpp")
    assert spec is not None and spec.submodule_search_locations
    libraries = Path(spec.submodule_search_locations[0]) / "lib"
    command = [
        *(compiler, "-std=c++17", "-O1", "-w", *options, f"-I{root / 'include'}", f"-I{root / 'ggml' / 'include'}"),
        *(program, f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}", "-o", out),
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"llama.cpp's {program.name} does not compile: {done.stderr[-500:]}")
    return out


def source(folder: Path) -> Path:
    """The folder of llama.cpp in the source of the installed llama-cpp-python."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        found = Path(given)
        if not found.exists():
            raise Missing(f"{VARIABLE} names {given}, which is not there")
    else:
        version = importlib.metadata.version("llama-cpp-python")
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"),
            *("--no-binary", ":all:", "--dest", str(folder), f"llama-cpp-python=={version}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        sdists = list(folder.glob("llama_cpp_python-*.tar.gz"))
        if not sdists:
            raise Missing(f"pip cannot download the source of llama-cpp-python {version}: {done.stderr[-300:]}")
        found = sdists[0]
    if found.is_file():
        with tarfile.open(found) as archive:
            archive.extractall(folder, filter="data")
        found = next(folder.glob("llama_cpp_python-*/"))
    for root in (found, found / "vendor" / "llama.cpp"):
        if (root / _TEST).is_file():
            return root
    raise Missing(f"{found} holds no {_TEST} of llama.cpp")
