"""Prompts from templates and topics, for a target whose user gives no texts, and requests for more prompts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

_TASKS = (
    "reverses the words of a sentence", "merges two sorted lists", "counts the vowels of a text",
    "finds the longest common prefix of a list of texts", "checks whether brackets are balanced",
    "computes the moving average of a list", "groups a list of dicts by a key", "flattens a nested list",
    "parses a date such as 2024-03-01 and returns the day of the week", "removes duplicates and keeps the order",
    "computes the edit distance of two texts", "finds the shortest path in a grid with walls",
    "converts Roman numerals to integers", "rotates a matrix by 90 degrees", "validates an e-mail address",
    "returns the n most frequent words of a text", "implements an LRU cache", "implements a stack with a minimum",
    "reads a CSV file and sums a column", "retries a call that fails, with growing pauses",
    "splits a list into parts of equal size", "finds the primes up to n", "evaluates an arithmetic expression",
    "computes the transpose of a sparse matrix", "walks a folder and lists the largest files",
    "encodes a text with run-length encoding", "searches a sorted list with binary search",
    "checks whether two texts are anagrams", "sorts a linked list", "computes the intersection of intervals",
)  # fmt: skip
_LANGUAGES = ("Python", "Python, with type hints", "Python, with tests", "JavaScript", "C++", "Go", "Rust", "Java")
_PROGRAMS = (
    *(f"Write a function in {language} that {{}}." for language in _LANGUAGES),
    'Complete this function:\n```python\ndef solve(value):\n    """A function that {}."""\n```',
    "Complete this class so that its method {}:\n```python\nclass Solution:\n    def run(self, value):\n```",
    "Which mistakes are common in a Python function that {}? Show a correct one.",
)
_SUBJECTS = (
    "photosynthesis", "compound interest", "the tides", "vaccines", "recursion", "the French Revolution", "inflation",
    "how a refrigerator works", "black holes", "hash tables", "plate tectonics", "how bread rises", "supply and demand",
    "the water cycle", "public key cryptography", "jet lag", "the Silk Road", "antibiotics", "virtual memory",
    "how a guitar makes sound", "earthquakes", "the immune system", "democracy", "garbage collection", "solar panels",
    "coral reefs", "the printing press", "electric motors", "sleep", "probability",
)  # fmt: skip
_WAYS = (
    "Explain {} to a ten-year-old.", "What should everybody know about {}? Give five points.",
    "Write a short encyclopedia entry about {}.", "Explain {} in one paragraph, then give an example.",
    "Which common mistakes do people make about {}?", "Compare two views on {}.",
    "Write three questions with answers for a quiz about {}.", "Summarise {} in at most 60 words.",
)  # fmt: skip
_PEOPLE = ("Ana", "Bilal", "Chen", "Dora", "Emil", "Fatou", "Goran", "Hana", "Ivo", "Jaya")
_SUMS = (
    "{0} buys {1} boxes of {2} pencils and gives away {3} pencils. How many are left?",
    "{0} walks {1} km a day for {2} days, then rests {3} days. How far is that, and how far a day on average?",
    "A shop sells {1} shirts at {2} dollars each and gives a discount of {3} percent. What does the shop of {0} earn?",
    "{0} saves {1} dollars a week and has {3} already. How many weeks are needed for a bicycle of {2}0 dollars?",
    "{0} fills a tank of {1}00 litres at {2} litres a minute, while {3} litres a minute leak. How long does it take?",
    "{0} reads {1} pages on Monday, twice as many on Tuesday, and {2} fewer on Wednesday. How many pages are left "
    "of a book of {3}00 pages?",
)  # fmt: skip
_HEROES = (
    "a lighthouse keeper", "a retired detective", "two sisters", "a robot gardener", "a lost courier", "a young baker",
    "an old ferryman", "a clockmaker", "a shy librarian", "a mountain guide", "a travelling musician", "a night nurse",
)  # fmt: skip
_PLOTS = (
    "who finds a letter that was never sent",
    "on the last day of summer",
    "who must choose between two promises",
    "who hears a knock at midnight",
    "and a storm that does not end",
    "who learns that a friend has lied",
    "who finds a door that was not there yesterday",
    "and a very small mistake",
    "who comes home after ten years",
)
_FORMS = (
    "Write a short story about {} {}.",
    "Write the opening scene of a novel about {} {}.",
    "Write a dialogue about {} {}.",
    "Tell a fairy tale about {} {}.",
)
_THINGS = (
    "fruits", "musical instruments", "rivers", "tools of a carpenter", "trees", "desserts", "sports", "planets",
    "programming languages", "kitchen tools", "birds", "board games", "jobs", "kinds of weather",
)  # fmt: skip
_ORDERS = (
    "List {1} {0}, one on a line, and nothing else.", "Make a Markdown table of {1} {0} with two further columns.",
    "Give {1} {0} as a JSON list of objects with the fields name and note.", "Rank {1} {0} and give a reason for each.",
    "Write an e-mail to a colleague that recommends {1} {0}.", "Translate the names of {1} {0} into German and French.",
)  # fmt: skip
_FIELDS = (
    "cooking", "gardening", "personal finance", "travel", "health and exercise", "history", "geography", "physics",
    "chemistry", "biology", "medicine", "law", "psychology", "philosophy", "religion and myths", "music", "films",
    "books and poems", "painting and design", "sports", "board games and puzzles", "pets and animals",
    "weather and climate", "space", "the oceans", "food and drink", "cars and traffic", "houses and repairs",
    "clothes and fashion", "children and school", "universities and exams", "languages and translation",
    "grammar and writing", "jobs and applications", "companies and marketing", "statistics and data", "mathematics",
    "logic", "algorithms", "databases", "web pages", "computer networks", "mobile phones and apps", "electronics",
    "energy", "farming", "politics and elections", "economics", "friendship and family", "celebrations and gifts",
)  # fmt: skip
_REQUESTS = (
    "Write ten different questions that people ask an assistant about {}.",
    "Write ten different tasks about {} that people give to an assistant: to write, compare, list, plan, correct or "
    "explain something.",
    "Write five detailed requests about {} that people make to an assistant, each with its circumstances in two "
    "sentences.",
)


def _maths() -> Iterator[str]:
    for i in itertools.count():
        yield _SUMS[i % len(_SUMS)].format(_PEOPLE[i % len(_PEOPLE)], 3 + i % 17, 4 + i % 23, 2 + i % 11)


def _filled(forms: Sequence[str], *parts: Sequence[object]) -> Iterator[str]:
    """All combinations, in an order in which neighbours share little."""
    lists: list[Sequence[object]] = [forms, *parts]
    total = 1
    for one in lists:
        total *= len(one)
    step = next(n for n in itertools.count(round(0.618 * total)) if math.gcd(n, total) == 1)
    for i in range(total):
        at, chosen = i * step % total, []
        for one in lists:
            chosen.append(one[at % len(one)])
            at //= len(one)
        yield str(chosen[0]).format(*chosen[1:])


def built_in() -> Mapping[str, Iterator[str]]:
    """Prompts by their kind: code, maths, explanations, stories, instructions."""
    return {
        "code": _filled(_PROGRAMS, _TASKS),
        "maths": itertools.islice(_maths(), 6 * 10 * 17),
        "explain": _filled(_WAYS, _SUBJECTS),
        "story": _filled(_FORMS, _HEROES, _PLOTS),
        "instruct": _filled(_ORDERS, _THINGS, (3, 4, 5, 6, 8, 10)),
    }


def for_prompts() -> Iterator[str]:
    """Requests to which a target answers with numbered prompts, up to ten each."""
    for request in _filled(_REQUESTS, _FIELDS):
        yield f"{request} Number them, one per line, without answers."
