"""Writes the pages of the Python API, made from its docstrings: `python docs/api/build.py FOLDER` (extra `docs`)."""

from __future__ import annotations

import os
import sys
import typing
from pathlib import Path
from typing import Any

import llama_cpp
import pdoc
import pdoc.doc

MODULES = (
    "pyfly_cpp",
    "pyfly_cpp.errors",
    "pyfly_cpp.decoding.gates",
    "pyfly_cpp.decoding.drafters",
    "pyfly_cpp.decoding.verify",
    "pyfly_cpp.decoding.presets",
    "pyfly_cpp.engine.stats",
    "pyfly_cpp.engine.handle",
    "pyfly_cpp.machine.extra_buffers",
    "pyfly_cpp.machine.kernels",
)

ALIASES = ("ArrayLike", "Drafter", "Prompt", "Tell")
"""Types that read better by their names than by what they stand for."""

PARTS = ("pyfly_cpp.llama.drafting_llama",)
"""Modules of base classes that have no page: their members are described where they are inherited."""


class Written(str):
    """An annotation as it stands in the source."""

    __repr__ = str.__str__


def build(folder: Path) -> None:
    """Writes index.html, and a page for each module, into a folder; warns where something cannot be resolved."""
    here, folder = Path(__file__).resolve().parent, folder.resolve()
    os.chdir(here)  # beside a folder of the package's name pdoc would ask which of the two is meant
    resolve = pdoc.doc.safe_eval_type

    def resolve_but_aliases(annotation: Any, names: dict[str, Any], *where: Any) -> Any:
        # Signatures of llama_cpp's methods are written with names that it imports from typing and from itself.
        resolved = resolve(annotation, {**vars(typing), **vars(llama_cpp.llama), **names}, *where)
        is_alias = isinstance(annotation, str) and any(alias in annotation for alias in ALIASES)
        return Written(annotation) if is_alias else resolved

    own_members = pdoc.doc.Class.own_members

    def own_members_and_parts(kind: pdoc.doc.Class) -> list[pdoc.doc.Doc[Any]]:
        of_parts = [members for (module, _), members in kind.inherited_members.items() if module in PARTS]
        return [*(member for members in of_parts for member in members), *own_members.__get__(kind)]

    pdoc.doc.safe_eval_type = resolve_but_aliases
    pdoc.doc.Class.own_members = property(own_members_and_parts)
    try:
        pdoc.render.configure(docformat="google", show_source=False, template_directory=here)
        pdoc.pdoc(*MODULES, output_directory=folder)
    finally:
        pdoc.doc.safe_eval_type = resolve
        pdoc.doc.Class.own_members = own_members


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Usage: python docs/api/build.py FOLDER")
    build(Path(sys.argv[1]))
