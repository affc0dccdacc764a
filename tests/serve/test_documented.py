"""The examples of docs/serving.md, asked of a server."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from documents import ROOT, blocks
from serving import running

SERVING = ROOT / "docs" / "serving.md"
PORT = "127.0.0.1:8080"


def test_python(batch):
    pytest.importorskip("openai")
    examples = [block for block in blocks(SERVING, "python") if block.marker == "server"]
    names = {}
    with running(batch, embeddings=True) as server:
        for block in examples:
            assert PORT in block.text
            exec(compile(block.text.replace(PORT, f"127.0.0.1:{server.port}"), str(block), "exec"), names)
    assert names["answer"].choices[0].message.content
    assert names["answer"].system_fingerprint.endswith("margin:0.3")
    assert len(names["vectors"].data) == 2


def test_curl(server):
    asked = re.findall(r"^curl .*$", SERVING.read_text(encoding="utf-8"), re.MULTILINE)
    assert asked
    for line in asked:
        _, url, _, body = shlex.split(line)
        answer = server.http.post(
            url.partition(PORT)[2], content=body, headers={"Content-Type": "application/x-www-form-urlencoded"}
        )
        assert answer.status_code == 200, answer.text
        assert json.loads(answer.text)["choices"][0]["message"]["content"]
