"""One request on a target, driven as FlyLlama drives it: a batch of one."""

from __future__ import annotations

from pyfly_cpp import Exact, Window
from pyfly_cpp._native import Batch
from pyfly_cpp.engine.stats import Governor, Record


def one_step(batch):
    """A step of the only request of a batch, and before it what has to be evaluated; how many tokens it committed."""
    while not (progress := batch.step_alone()).is_step:
        pass
    return progress.n_records


class Engine:
    """`configure`, `begin`, `prefill`, `step`, ... of the only slot of a batch."""

    def __init__(self, target):
        self._batch = Batch(target)
        self._slot = self._batch.slots[0]
        self._request = (Exact().nodes(), Window().config(), {})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._batch.close()

    def configure(self, gate, window, drafters=(), *, adaptive=False, **request):
        self._batch.configure(drafters, adaptive=adaptive)
        window.config()
        self._request = (gate.nodes(), window.config(), request)

    def begin(self, history, n_evaluated=0, sampler=None, **more):
        nodes, window, request = self._request
        self._slot.begin(history, nodes, window, n_evaluated=n_evaluated, sampler=sampler, **request, **more)

    def prefill(self):
        if self._slot.n_left > 0:
            self._batch.step_alone()
        return self._slot.n_left

    def step(self):
        return one_step(self._batch)

    def record(self, i):
        return Record.of(self._slot.record(i))

    def governor(self):
        return Governor.of(self._batch.governor(), [drafter.name for drafter, _ in self._batch.drafters])

    def __getattr__(self, name):
        return getattr(self._slot, name)
