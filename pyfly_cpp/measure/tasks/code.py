"""Common parts of the tasks whose outputs are programs: these are judged by running them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from pyfly_cpp.measure.tasks import extraction
from pyfly_cpp.measure.tasks.sandbox import Containment, Limits, require_containment, run_program
from pyfly_cpp.measure.tasks.task import Item, Task, Verdict


class CodeTask(Task):
    """A task whose outputs are completed to programs that run to their end if they are right."""

    runs_code = True
    criterion = "passed"

    def __init__(self, limits: Limits = Limits(), containment: Containment = "bubblewrap") -> None:  # noqa: B008 - frozen
        self.limits = limits
        self.containment: Containment = containment

    def require(self) -> None:
        """Raises SandboxError if nothing contains a program."""
        require_containment(self.containment)

    @abstractmethod
    def program(self, item: Item, completion: str) -> str:
        """The program whose end without an exception is a pass."""

    def score(self, item: Item, text: str, tokens: Sequence[int]) -> Verdict:
        """Correct: all tests pass. Detail: `status` and `reason` of its outcome."""
        code = extraction.until_fence(text)
        outcome = run_program(self.program(item, code), self.limits, self.containment)
        return Verdict(outcome.passed, code, "passes its tests", {"status": outcome.status, "reason": outcome.detail})
