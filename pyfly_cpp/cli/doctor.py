"""`pyfly-cpp doctor`: what is installed, and whether a model and a draft fit. Reads no weights, except for
--prove (`prove.py`)."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import cffi
import click
import llama_cpp
import numpy as np

from pyfly_cpp import _native
from pyfly_cpp._version import __version__
from pyfly_cpp.cli import in_options, prove
from pyfly_cpp.cli.headings import HeadedCommand, number
from pyfly_cpp.cli.kinds import FILE, MODEL, Int
from pyfly_cpp.cli.loading import (
    MODEL_ARGUMENT,
    llama_reasons,
    machine_options,
    machine_options_given,
    named_once,
    silence,
    try_kernels,
)
from pyfly_cpp.cli.terminal import Bar, note, write, write_sentences
from pyfly_cpp.decoding.drafters import DRAFTERS
from pyfly_cpp.errors import NativeError, PyflyError, RpcError, counted
from pyfly_cpp.machine import exactness, extra_buffers, kernels
from pyfly_cpp.machine.conditions import used_by_others
from pyfly_cpp.machine.devices import devices
from pyfly_cpp.machine.files import require_gguf
from pyfly_cpp.machine.memory import available, in_words
from pyfly_cpp.machine.rpc import devices_of
from pyfly_cpp.machine.threads import physical_cores, threads_sleep
from pyfly_cpp.models.metadata import is_whole_model, metadata, open_metadata, quantisation
from pyfly_cpp.models.named import embedded_model, resolve_model

_LABEL = 20
"""Columns of what stands before a value."""

_VOCABULARIES = {
    llama_cpp.LLAMA_VOCAB_TYPE_NONE: "none",
    llama_cpp.LLAMA_VOCAB_TYPE_SPM: "SentencePiece (SPM)",
    llama_cpp.LLAMA_VOCAB_TYPE_BPE: "byte-level BPE",
    llama_cpp.LLAMA_VOCAB_TYPE_WPM: "WordPiece",
    llama_cpp.LLAMA_VOCAB_TYPE_UGM: "Unigram (UGM)",
    llama_cpp.LLAMA_VOCAB_TYPE_RWKV: "RWKV",
    llama_cpp.LLAMA_VOCAB_TYPE_PLAMO2: "PLaMo-2",
}


HELP = """Show versions and devices, also of RPC servers, and whether a draft suits a model. Exit code 1 if it does
not, or if a server does not answer.

\b
Example:
  pyfly-cpp doctor -m target.gguf -d draft.gguf

--prove loads the model and answers 20 prompts plainly and in other ways: with each drafter, from saved states, eight at
a time, with another number of threads. It compares all bits of the logits, also of batches of 1 to 32 tokens. Its last
line is `exact here`, or what is not computed by our kernels and where that showed, or that the draft or the model's MTP
head drafted nothing. Exit code 1 unless it is exact. It takes minutes for a model of 1 GB. Only --prove uses the
options under `Model and machine` (--help-all), except for --rpc."""


@click.command(
    "doctor",
    cls=HeadedCommand,
    short_help="Show versions and devices, and whether a draft suits a model.",
    help=HELP,
)
@MODEL_ARGUMENT
@click.option("-m", "--model", type=MODEL, help="Look into this model.")
@click.option("-d", "--draft", type=MODEL, help="Look into this draft model; with --model: do the two fit?")
@click.option("--prove", "proves", is_flag=True, help="Show that drafts change no answer of the model here.")
@click.option("--prompts", "prompt_file", type=FILE, help="Prompts for --prove, .txt or JSONL.  "
              "[default: 20 built-in ones]")  # fmt: skip
@number("-n", "--max-tokens", kind=Int(2), default=16, help="Maximum answer length of --prove in tokens.")
@click.option("-o", "--output", type=FILE, help="Write what --prove finds: FILE.html, a page, or FILE.json.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@machine_options
def command(
    named: str | None,
    model: str | None,
    draft: str | None,
    proves: bool,
    prompt_file: str | None,
    max_tokens: int,
    output: str | None,
    force: bool,
    as_json: bool,
    arguments: dict[str, Any],
) -> None:
    silence()
    model = named_once(named, model)
    _require_use(proves, model, output, prompt_file)
    prove.require_output(output, force)
    with Bar() as bar:
        try_kernels(None, bar)
    remote, problems = _remote_devices(arguments.get("rpc_servers", ()))
    report: dict[str, Any] = {"versions": _versions(), "machine": _machine(), "devices": [*_devices(), *remote]}
    report["rpc_problems"] = problems
    embedded = embedded_model()
    report["embedded_model"] = None if embedded is None else str(embedded)
    given = (("model", model, "model"), ("draft", draft, "draft model"))
    paths = {title: _gguf(text, what) for title, text, what in given if text is not None}
    report.update({title: _model(path) for title, path in paths.items()})
    problem = None
    if len(paths) == 2:
        report["draft_word"], problem = _fit(paths["model"], paths["draft"])
        report["draft_fits"] = problem is None
        report["draft_problem"] = problem
    if not as_json:
        _show(report)
    is_exact = True
    if proves:
        proof, about = prove.run(paths["model"], paths.get("draft"), arguments, prompt_file, max_tokens)
        report["proof"] = proof.as_dict()
        is_exact = proof.is_exact
        if not as_json:
            prove.show(proof)
        if output is not None:
            prove.save(proof, about, output)
    if as_json:
        write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    if problem is not None or problems or not is_exact:
        sys.exit(1)


def _require_use(proves: bool, model: str | None, output: str | None, prompt_file: str | None) -> None:
    """Raises UsageError for options that have no use without --prove, and for --prove without a model."""
    if proves:
        if model is None:
            raise click.UsageError("--prove needs a model; give it with --model.")
        return
    others = [("--output", output), ("--prompts", prompt_file)]
    given = [flag for flag in machine_options_given() if flag != "--rpc"]
    given += [flag for flag, value in others if value is not None]
    if given:
        raise click.UsageError(f"{given[0]} is for --prove; add that, or leave it out.")


# ---- The installation ------------------------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    return {
        "pyfly-cpp": __version__,
        "llama-cpp-python": llama_cpp.__version__,
        "llama.cpp": _llama_cpp_version(),
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "cffi": cffi.__version__,
    }


def _llama_cpp_version() -> str:
    """The version of llama.cpp, in releases that have one."""
    version = getattr(llama_cpp, "llama_version", None)
    return "" if version is None else version().decode("utf-8", errors="replace")


def _machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "physical_cores": physical_cores(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "used_by_others": used_by_others(),
        "threads_sleep": threads_sleep(),
        "row_statistics": _native.simd_level,
        "llama_cpp_features": llama_cpp.llama_print_system_info().decode("utf-8", errors="replace").strip(" |"),
        "gpu_offload": bool(llama_cpp.llama_supports_gpu_offload()),
        "rpc": bool(llama_cpp.llama_supports_rpc()),
        "kernels": kernels.describe(),
        "extra_buffers": extra_buffers.verdict()._asdict(),
    }


def _devices() -> list[dict[str, Any]]:
    """This machine's; ggml takes all memory of the CPU's for free."""
    free = available()
    return [{**one, "memory_free": free} if one["kind"] == "CPU" and free is not None else one for one in devices()]


def _remote_devices(names: tuple[str, ...]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The devices of these RPC servers, and what is wrong with those that have none."""
    found: list[dict[str, Any]] = []
    problems: dict[str, str] = {}
    for name in names:
        try:
            found += [device.as_dict() for device in devices_of(name)]
        except RpcError as error:
            problems[name] = str(error)
    return found, problems


def _threads(machine: dict[str, Any]) -> str:
    used = machine["used_by_others"]
    others = "" if used is None else f"; other programs are using {used:.1f} cores"
    cores = machine["physical_cores"]
    slow = "; slow, because OMP_WAIT_POLICY is PASSIVE: unset it" if machine["threads_sleep"] else ""
    return f"auto: {'1' if cores == 1 else f'at most {cores}, fewer while other programs use cores'}{others}{slow}"


# ---- Models ----------------------------------------------------------------------------------------------------------


def _gguf(text: str, what: str) -> Path:
    path = resolve_model(text)
    require_gguf(str(path), what)
    return path


def _model(path: Path) -> dict[str, Any]:
    with llama_reasons(), open_metadata(path, load_mtp=True) as model:
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        kind = llama_cpp.llama_vocab_type(vocabulary)
        return {
            "path": str(path),
            "name": metadata(model, "general.name"),
            "architecture": metadata(model, "general.architecture"),
            "quantisation": quantisation(model),
            "size": llama_cpp.llama_model_size(model),
            "n_params": llama_cpp.llama_model_n_params(model),
            "n_ctx_train": llama_cpp.llama_model_n_ctx_train(model),
            "n_layer": llama_cpp.llama_model_n_layer(model),
            "n_layer_mtp": llama_cpp.llama_model_n_layer_nextn(model),
            "n_vocab": llama_cpp.llama_vocab_n_tokens(vocabulary),
            "vocab_type": _VOCABULARIES.get(kind, str(kind)),
            "chat_template": llama_cpp.llama_model_chat_template(model, None) is not None,
            "is_recurrent": bool(llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)),
            "n_protected": _n_protected(model) if is_whole_model(path) else None,
            "inexact": _inexact(path) if is_whole_model(path) else None,
        }


def _inexact(path: Path) -> tuple[str, ...] | None:
    """Why drafts may change answers of this model, loaded on the CPU with the defaults; empty: they cannot; None: it is
    not known."""
    found = kernels.take(None, str(path), {})
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 64
    has_attention = found.attends(_native.inspect_model(str(path)))
    params.flash_attn_type = (
        llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if has_attention else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    where = {"n_gpu_layers": 0, "use_extra_bufts": extra_buffers.usable()}
    with _native.kernels_taken(found.bits), open_metadata(path, **where) as model:
        context = _context(model, params)
        if not context:
            return None
        try:
            return exactness.reasons(context)
        except NativeError:
            return None
        finally:
            llama_cpp.llama_free(context)


def _context(model: Any, params: Any) -> Any:
    """A llama_context; null if llama.cpp can make none, also where that would end the process."""
    with _native.load_guard():
        return llama_cpp.llama_init_from_model(model, params)


def _n_protected(model: Any) -> int | None:
    """How many tokens are never accepted loosely; None if llama.cpp can make no context of the model."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 64
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED  # some graphs cannot have it, and all do without
    context = _context(model, params)
    if not context:
        return None
    try:
        with _native.LlamaTarget(context) as target:
            return len(target.protected)
    finally:
        llama_cpp.llama_free(context)


def _fit(target: Path, draft: Path) -> tuple[str | None, str | None]:
    """The word of the drafter that the draft can be for the target, or why it cannot be any."""
    try:
        with llama_reasons(), open_metadata(target) as model:
            return _native.companion_word(model, str(draft)), None
    except (ValueError, PyflyError) as error:
        return None, in_options(error)


# ---- What is shown ---------------------------------------------------------------------------------------------------


def _show(report: dict[str, Any]) -> None:
    rows: list[tuple[str, str] | None] = list(report["versions"].items())
    machine = report["machine"]
    load = "" if machine["load"] is None else f" (load {machine['load']:.1f})"
    offload = "yes" if machine["gpu_offload"] else "no: this llama-cpp-python was built for the CPU only"
    rows += [
        None,
        ("system", machine["system"]),
        ("physical cores", f"{machine['physical_cores']}{load}"),
        ("threads", _threads(machine)),
        ("llama.cpp features", machine["llama_cpp_features"]),
        ("GPU offload", offload),
        ("RPC servers", "yes" if machine["rpc"] else "no: build llama-cpp-python with CMAKE_ARGS=-DGGML_RPC=on"),
        ("kernels", machine["kernels"]),
    ]
    buffers = machine["extra_buffers"]
    if not buffers["usable"]:
        remedy = "" if buffers["remedy"] is None else f"; {buffers['remedy']}"
        rows.append(("extra buffers", f"not used: {buffers['reason']}{remedy}"))
    for device in report["devices"]:
        memory = f"{in_words(device['memory_free'])} of {in_words(device['memory_total'])} free"
        rows.append((f"device {device['name']}", f"{device['kind']}, {device['description']}, {memory}"))
    rows += [(f"server {name}", problem) for name, problem in report["rpc_problems"].items()]
    embedded = report["embedded_model"] or "not installed (pip install 'pyfly-cpp[demo]')"
    rows += [None, ("demo model", embedded)]
    for title in ("model", "draft"):
        if title in report:
            rows += [None, (title, report[title]["path"]), *_describe(report[title])]
    if "draft_fits" in report:
        word = report["draft_word"]
        rows += [None, ("draft fits", f"yes, as {DRAFTERS[word].noun}" if word else f"no: {report['draft_problem']}")]
    for row in rows:
        write_sentences(f"{row[0]:{_LABEL - 1}} {row[1]}" if row else "", _LABEL)
    if "model" not in report and "draft" not in report:
        note("\nA model, and whether a draft fits it: pyfly-cpp doctor -m MODEL -d DRAFT")


def _describe(model: dict[str, Any]) -> list[tuple[str, str]]:
    drafts = "possible"
    if model["n_protected"] is None:
        drafts = "-: llama.cpp makes no context of this file alone (a draft head?)"
    elif model["is_recurrent"]:
        drafts = "possible; its recurrent state is rolled back through snapshots, or replayed"
    head = ", with an MTP head" if model["n_layer_mtp"] else ""
    n_params = f"{model['n_params'] / 1e9:.2f} B" if model["n_params"] >= 1e9 else f"{model['n_params'] / 1e6:.1f} M"
    return [
        ("  name", model["name"] or "-"),
        ("  architecture", f"{model['architecture']}, {counted(model['n_layer'], 'layer')}{head}"),
        ("  size", f"{in_words(model['size'])}, {n_params} parameters, {model['quantisation']}"),
        ("  context", f"{model['n_ctx_train']} tokens"),
        ("  vocabulary", f"{model['n_vocab']} tokens, {model['vocab_type']}"),
        ("  chat template", "yes" if model["chat_template"] else "no"),
        ("  drafts", drafts),
        ("  same answers", _same_answers(model["inexact"])),
    ]


def _same_answers(inexact: tuple[str, ...] | None) -> str:
    if inexact is None:
        return "-"
    return f"not always: {'; '.join(inexact)}" if inexact else "yes: with exact, drafts change no answer"
