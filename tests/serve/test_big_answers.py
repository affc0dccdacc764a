"""Big answers: they are written in portions and in threads, while the event loop has others to serve."""

from __future__ import annotations

import json
import threading

import pytest
from serving import BIG

from pyfly_cpp.serve.streams import Entries, portions


def test_portions_are_the_json():
    values = [{"a": i, "b": ["ä", None, 0.5, {"c": "x" * 500}]} for i in range(700)]
    entries = Entries(values[:1])
    for some in (values[1:100], [], values[100:101], Entries(), Entries(values[101:])):
        entries.extend(some)
    entries.extend([{"a": Entries(), "b": [Entries([[1], 2]), 3]}])
    values.append({"a": [], "b": [[[1], 2], 3]})
    assert json.loads(b"".join(portions(Entries([1])))) == [1]
    written = portions({"before": [], "all": entries, "none": Entries(), "nested": [{"x": Entries([1])}], "text": "z"})
    assert len(written) > 8 and max(map(len, written)) < 2**18
    told = {"before": [], "all": values, "none": [], "nested": [{"x": [1]}], "text": "z"}
    assert json.loads(b"".join(written)) == told


@pytest.mark.parametrize("path, body, fields", [
    ("/tokenize", {"content": "a b " * 4000, "with_pieces": True}, ("tokens",)),
    ("/v1/completions", {**BIG, "records": True}, ("choices", "id")),
])  # fmt: skip
def test_big_answers_are_written_in_threads(server, monkeypatch, path, body, fields):
    """Not in the event loop, nor much in one go."""
    sizes = {}
    real = Entries._append

    def noting(self, *more):
        own = sizes.setdefault(threading.current_thread().name, [])
        own += map(len, more)
        real(self, *more)

    monkeypatch.setattr(Entries, "_append", noting)
    answer = server.post(path, **body).json()
    assert all(answer[field] for field in fields)
    (loop,) = {name for name in sizes if not name.startswith(("asyncio_", "pyfly-reading"))} or {None}
    others = [size for name, own in sizes.items() if name != loop for size in own]
    assert sum(others) > 2**17 and max(others) < 2**18
    assert sum(sizes.get(loop, [])) < sum(others) / 20


def test_log_probabilities_of_prompts_have_a_limit(server):
    """A body of a few hundred kilobytes could ask for a gigabyte of them."""
    body = {"prompt": [[5] * 400] * 128, "max_tokens": 1, "echo": True}
    got = server.post("/v1/completions", **body, logprobs=20)
    assert got.status_code == 400 and got.json()["error"]["param"] == "logprobs"
