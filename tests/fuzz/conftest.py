"""What the fuzzers share: how many cases, which ones, and how to repeat the one that failed.

Every fuzzer makes its cases from seeds: `for seed in cases(200): ...`. Without anything set these are 0..199, the same
ones each time. PYFLY_FUZZ_CASES says how many; PYFLY_FUZZ_SEED is the first seed, alone the only one.
"""

from __future__ import annotations

import os

import pytest

_CURRENT = pytest.StashKey[int]()


@pytest.fixture
def cases(request):
    """cases(n_default) -> seeds. A test that fails says which one it was at."""

    def run(n_default):
        first = os.environ.get("PYFLY_FUZZ_SEED")
        n = int(os.environ.get("PYFLY_FUZZ_CASES", n_default if first is None else 1))
        for seed in range(int(first or 0), int(first or 0) + n):
            request.node.stash[_CURRENT] = seed
            yield seed

    return run


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    report = (yield).get_result()
    if report.failed and _CURRENT in item.stash:
        report.sections.append(
            ("fuzz", f"the last case was {item.stash[_CURRENT]}; repeat it with PYFLY_FUZZ_SEED={item.stash[_CURRENT]}")
        )
