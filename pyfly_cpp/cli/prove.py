"""`pyfly-cpp doctor --prove`: loads the model, and shows the proof that its answers stay the same."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pyfly_cpp import _native
from pyfly_cpp.cli import if_interrupted, in_options
from pyfly_cpp.cli.loading import Models
from pyfly_cpp.cli.terminal import Bar, note, write_sentences
from pyfly_cpp.decoding.drafters import DRAFTERS, MTP, CrossVocabulary, DraftModel, OwnDrafter, PromptLookup
from pyfly_cpp.decoding.resolve import N_CTX_OF_DEMO, drafter_of_file, has_mtp_head
from pyfly_cpp.errors import PyflyError
from pyfly_cpp.heads.built_in_prompts import built_in
from pyfly_cpp.machine.conditions import describe_machine, describe_model, used_by_others
from pyfly_cpp.machine.files import require_free, write_atomically
from pyfly_cpp.machine.prompt_sets import read_prompts
from pyfly_cpp.machine.threads import AUTO, physical_cores
from pyfly_cpp.measure.proof import Proof, render
from pyfly_cpp.measure.proving import prove
from pyfly_cpp.models.metadata import open_metadata
from pyfly_cpp.models.named import embedded_model

N_PROMPTS = 20
_FORMATS = (".html", ".json")


def require_output(path: str | None, force: bool) -> None:
    """Before any work: that the proof can be written to this file. Raises ValueError."""
    if path is not None:
        if Path(path).suffix not in _FORMATS:
            raise ValueError(f"{path} is neither a page nor JSON; name it FILE.html or FILE.json.")
        require_free(path, force)


def run(
    model: Path, draft: Path | None, arguments: Mapping[str, Any], prompt_file: str | None, max_tokens: int
) -> tuple[Proof, dict[str, Any]]:
    """The proof of a model, and what it is of: machine, files, options.

    Args:
        draft: A draft model or head that drafts in a further way.
        arguments: Those of `FlyLlama` that were set.
        prompt_file: A file as of `read_prompts`; None: 20 built-in prompts.

    Raises:
        ValueError, PyflyError: a file is unfit, or the model cannot be loaded or evaluated.
    """
    if_interrupted("Nothing was written.")
    prompts = _prompts(prompt_file)
    n_threads = arguments["n_threads"]
    if n_threads == AUTO:  # a fixed number: threads that wait for a busy core take many times as long
        n_threads = max(1, physical_cores() - round(used_by_others() or 0))
    models = Models(model, draft, "none", None, {}, {**arguments, "n_threads": n_threads})
    drafters: dict[str, OwnDrafter] = {"prompt lookup": PromptLookup()}
    left_out: dict[str, str] = {}
    if has_mtp_head(model):
        drafters["MTP head"] = MTP()
    if draft is not None:
        try:
            drafters["draft"] = drafter_of_file(model, draft)
        except (ValueError, PyflyError) as error:
            left_out["draft"] = in_options(error)
    demo = embedded_model()
    if demo is not None:
        drafters["demo model"] = _drafter_of_demo(model, demo)
    first = drafters.get("MTP head", drafters["prompt lookup"])

    def load(kind: Any, *more: Any, **given: Any) -> Any:
        said: dict[str, Any] = {name: given.pop(name) for name in ("n_ctx", "n_threads", "kernels") if name in given}
        return replace(models, arguments={**models.arguments, **said}).load(kind, *more, **given)

    with Bar() as bar:
        proof = prove(
            load, prompts, drafters, first=first, max_tokens=max_tokens, n_threads=n_threads, left_out=left_out,
            required=("MTP head", "draft"),
            tell=lambda name, done, total: bar.update(f"proof, {name}", done, total, f"{done} of {total}"),
        )  # fmt: skip
    files = {name: describe_model(path) for name, path in (("model", model), ("draft", draft)) if path is not None}
    options = {name: value for name, value in models.arguments.items() if name != "verbose"}
    return proof, {"machine": describe_machine(), "files": files, "options": options}


def _prompts(file: str | None) -> dict[str, str]:
    """Texts by their names."""
    found = {one.id: one.turns[0] for one in (read_prompts() if file is None else read_prompts(file))}
    if file is None:
        more = chain.from_iterable(islice(texts, 2) for texts in built_in().values())
        for i, text in enumerate(islice(more, N_PROMPTS - len(found)), 1):
            found[f"more-{i}"] = text
    return found


def _drafter_of_demo(model: Path, demo: Path) -> OwnDrafter:
    """The demo model as a drafter: of the model's own vocabulary, if that is the same."""
    try:
        with open_metadata(model) as target:
            kind = DRAFTERS[_native.companion_word(target, os.fspath(demo))]
    except (ValueError, PyflyError):
        kind = CrossVocabulary
    return kind.make(demo, n_ctx=N_CTX_OF_DEMO) if issubclass(kind, (CrossVocabulary, DraftModel)) else kind.make(demo)


def show(proof: Proof) -> None:
    """Prints the proof."""
    sampled = f", {proof.n_sampled} of them drawn with a seed" if proof.n_sampled else ""
    about = f"{proof.n_answers} prompts, at most {proof.max_tokens} tokens{sampled}; {proof.seconds:.0f} s"
    rows = [(f"  {name}", text) for name, text in proof.rows()]
    label = max(len(name) for name, _ in rows) + 1
    for name, text in (("\nproof", about), *rows):
        write_sentences(f"{name:{label + name.count(chr(10))}}{text}", label)
    write_sentences(f"\n{proof.verdict}")


def save(proof: Proof, about: Mapping[str, Any], path: str) -> None:
    """Writes the proof, as a page or as JSON by the name of the file."""
    if Path(path).suffix == ".json":
        text = json.dumps({**about, "proof": proof.as_dict()}, indent=2, ensure_ascii=False) + "\n"
    else:
        text = render(proof, _facts(about))
    write_atomically(path, text)
    note(f"Written to {path}")


def _facts(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = about["machine"]
    files = [(name, f"{one['file']} (sha256 {one['sha256'][:12]})") for name, one in about["files"].items()]
    options = ", ".join(f"{name} {value}" for name, value in about["options"].items())
    return [
        *files,
        ("options", options),
        ("machine", f"{machine['cpu']}, {machine['physical_cores']} physical cores, {machine['system']}"),
        ("versions", f"pyfly-cpp {machine['pyfly_cpp']}, llama-cpp-python {machine['llama_cpp_python']}"),
        ("when", machine["started"]),
    ]
