"""CommonsenseQA: five-way questions of everyday knowledge. How it is asked and read: choice.py."""

from __future__ import annotations

from pyfly_cpp.evaluation.choice import ChoiceTask


class CommonsenseQa(ChoiceTask):
    """Rows: `id`, `question`, `choices` (five), `answer`."""

    name = "commonsenseqa"
    title = "CommonsenseQA, five choices, reasoned and read from the text"
    n_choices = 5
