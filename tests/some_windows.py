"""Windows for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from pyfly_cpp import Window


def some_windows(most, most_tail, across=(None, True, False)):
    """All of a size and a tail up to these; under agree none outlives its step."""
    fields = {"size": st.integers(0, most), "tail": st.none() | st.integers(0, most_tail)}
    within = [each for each in across if not each]
    return st.builds(Window, rule=st.just("agree"), across_rounds=st.sampled_from(within), **fields) | st.builds(
        Window, rule=st.just("reconverge"), across_rounds=st.sampled_from(across), **fields
    )
