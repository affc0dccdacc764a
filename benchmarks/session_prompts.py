"""A session of 20 related prompts: edits of one source file, questions about one document, and variants of one task."""

from __future__ import annotations

SOURCE = """import json
import time


class Cache:
    def __init__(self, path, max_age=3600):
        self.path = path
        self.max_age = max_age
        self.entries = {}
        self.hits = 0
        self.misses = 0

    def load(self):
        with open(self.path) as file:
            self.entries = json.load(file)

    def save(self):
        with open(self.path, "w") as file:
            json.dump(self.entries, file)

    def get(self, key):
        entry = self.entries.get(key)
        if entry is None or time.time() - entry["time"] > self.max_age:
            self.misses += 1
            return None
        self.hits += 1
        return entry["value"]

    def put(self, key, value):
        self.entries[key] = {"value": value, "time": time.time()}

    def remove_old(self):
        now = time.time()
        for key in list(self.entries):
            if now - self.entries[key]["time"] > self.max_age:
                del self.entries[key]
"""

DOCUMENT = """Opening hours and rules of the municipal library

The library is open from Tuesday to Friday from 10 am to 7 pm, and on Saturday from 10 am to 2 pm. It is closed on
Sunday, on Monday and on public holidays. The reading room opens one hour earlier than the library itself.
A library card costs 12 euros a year; for pupils, students and people on social assistance it is free. A lost card is
replaced for 3 euros. Members may borrow up to 20 items at the same time, of which at most 5 may be films and at most 2
may be musical instruments.
Books are lent for four weeks, films and magazines for one week, and musical instruments for three months. A loan can
be
renewed twice, online or at the desk, unless another member has reserved the item. Musical instruments cannot be
renewed.
For each day and item that is returned late the library charges 30 cents, up to 10 euros for each item. Whoever owes
more
than 20 euros cannot borrow anything until the debt is paid. Damaged or lost items have to be replaced at their present
price, plus a fee of 5 euros for the work that they make.
Children under 14 years need the written permission of a parent for a card, and films are lent to them only if they are
rated for their age. Food is not allowed in the library, except in the cafe on the ground floor; drinks are allowed if
they can be closed.
"""

EDITS = (
    "Add type annotations to all methods.",
    "Add a docstring of one sentence to the class and to each method.",
    "Add a method `clear` that removes all entries and resets the counters.",
    "Make `load` keep the cache empty if the file does not exist.",
    "Rename `remove_old` to `prune` and let it return how many entries were removed.",
    "Add a property `hit_rate` that returns hits / (hits + misses), or 0 if there were none.",
    "Use pathlib.Path in place of open.",
    "Add a method `__contains__` that tells whether a key is in the cache and not too old.",
)

QUESTIONS = (
    "Summarise the rules on borrowing in five bullet points.",
    "What does it cost to return things late, and what follows if somebody does not pay? Quote the rules.",
    "Which rules concern musical instruments? Quote them.",
    "A student lost her card and returns two books ten days late. What does she pay? Explain step by step.",
    "Write a short notice for children and their parents with the rules that concern them.",
    "List all fees of the library in a table.",
)

TASKS = tuple(
    f"Write a Python script with argparse that reads a CSV file and {what}. Handle a missing file and empty rows."
    for what in (
        "prints the sum of a column that the user names",
        "prints the mean of a column that the user names",
        "prints the largest and the smallest value of a column that the user names",
        "prints how often each value of a column occurs",
        "writes a copy of it without a column that the user names",
        "writes a copy of it that is sorted by a column that the user names",
    )
)

SESSION = (
    *(("edit", f"```python\n{SOURCE}```\n\n{edit} Answer with the whole file.") for edit in EDITS),
    *(("question", f"{DOCUMENT}\n{question}") for question in QUESTIONS),
    *(("task", task) for task in TASKS),
)
"""(kind, prompt) of each of the 20 requests; none sees the others."""
