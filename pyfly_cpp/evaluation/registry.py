"""The tasks by name."""

from __future__ import annotations

import difflib

from pyfly_cpp.evaluation.commonsenseqa import CommonsenseQa
from pyfly_cpp.evaluation.gsm8k import Gsm8k
from pyfly_cpp.evaluation.humaneval import HumanEval
from pyfly_cpp.evaluation.mbpp import Mbpp
from pyfly_cpp.evaluation.mgsm import Mgsm
from pyfly_cpp.evaluation.mmlu import Mmlu
from pyfly_cpp.evaluation.needle import Needle
from pyfly_cpp.evaluation.task import Task
from pyfly_cpp.evaluation.writing import Writing

TASKS: dict[str, Task] = {
    task.name: task
    for task in (Gsm8k(), Mgsm(), HumanEval(), Mbpp(), CommonsenseQa(), Mmlu(), Needle(), Writing())
}  # fmt: skip
"""In the order of the documentation."""


def get_task(name: str) -> Task:
    """The task of that name; raises ValueError, with the nearest name, if there is none."""
    if name in TASKS:
        return TASKS[name]
    near = difflib.get_close_matches(name.lower(), TASKS, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown task {name!r}.{hint} The tasks are {', '.join(TASKS)}.")
