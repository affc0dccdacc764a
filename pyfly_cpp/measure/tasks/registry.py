"""The tasks by name."""

from __future__ import annotations

from pyfly_cpp.errors import did_you_mean
from pyfly_cpp.measure.tasks.commonsenseqa import CommonsenseQa
from pyfly_cpp.measure.tasks.gsm8k import Gsm8k
from pyfly_cpp.measure.tasks.humaneval import HumanEval
from pyfly_cpp.measure.tasks.mbpp import Mbpp
from pyfly_cpp.measure.tasks.mgsm import Mgsm
from pyfly_cpp.measure.tasks.mmlu import Mmlu
from pyfly_cpp.measure.tasks.needle import Needle
from pyfly_cpp.measure.tasks.task import Task
from pyfly_cpp.measure.tasks.writing import Writing

TASKS: dict[str, Task] = {
    task.name: task
    for task in (Gsm8k(), Mgsm(), HumanEval(), Mbpp(), CommonsenseQa(), Mmlu(), Needle(), Writing())
}  # fmt: skip
"""In the order of the documentation."""


def get_task(name: str) -> Task:
    """The task of that name; raises ValueError, with the nearest name, if there is none."""
    if name in TASKS:
        return TASKS[name]
    raise ValueError(
        f"unknown task {name!r}.{did_you_mean(name.lower(), TASKS, 0.5)} The tasks are {', '.join(TASKS)}."
    )
