"""Reading the grammars of many clients, some of whom send what is hard to read; and processes that end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time

import pytest

from pyfly_cpp.grammar._process import GrammarReader, ReaderTurns
from pyfly_cpp.grammar.readers import Unavailable
from pyfly_cpp.serve.api_errors import ApiError
from pyfly_cpp.serve.grammars import Constraint, Grammars

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="readers are forked")

HARD = '"' + "ab " * 20_000 + '"'


def gbnf(text):
    return Constraint("gbnf", text, "grammar")


def endless(n):
    """A grammar that takes too long to read, and that differs from others."""
    return gbnf(f'root ::= "{n}" {HARD}')


def schema(name):
    return Constraint("schema", json.dumps([[{"type": "object", "properties": {name: {}}}]]), "response_format")


def with_grammars(path, work, seconds=5.0):
    """Runs work(grammars) in an event loop."""

    async def main():
        grammars = Grammars(path, 2**16, seconds)
        try:
            return await work(grammars)
        finally:
            grammars.close()

    return asyncio.run(main())


async def refusal(grammars, constraint, whose=""):
    with pytest.raises(ApiError) as failure:
        await grammars.compile(constraint, whose)
    return failure.value


def counted(grammars, monkeypatch):
    """The constraints that are read from now on."""
    seen, read = [], grammars._readers.read

    def noting(constraint, *more):
        seen.append(constraint["text"])
        return read(constraint, *more)

    monkeypatch.setattr(grammars._readers, "read", noting)
    return seen


async def process_of(grammars):
    """The process, when it is ready."""
    await grammars.compile(gbnf('root ::= "ready"'))
    return grammars._readers._process


@pytest.mark.parametrize("whose", ["hog", "other"])
def test_hard_grammars_hold_up_no_easy_one(tiny_target, whose):
    async def work(grammars):
        await process_of(grammars)
        hard = [asyncio.ensure_future(refusal(grammars, endless(i), "hog")) for i in range(6)]
        await asyncio.sleep(0)
        assert (await grammars.compile(schema("a"), whose)).kind == "good"
        n_left = sum(not task.done() for task in hard)
        for failure in await asyncio.gather(*hard):
            assert failure.status == 400 and failure.param == "grammar"
        return n_left

    assert with_grammars(tiny_target, work, seconds=0.5) > 0


def test_verdicts_are_remembered(tiny_target, monkeypatch):
    async def work(grammars):
        await process_of(grammars)
        seen = counted(grammars, monkeypatch)
        for _ in range(2):
            await refusal(grammars, endless(0))
            await grammars.compile(schema("a"))
        for i in range(70):  # others' refusals take no good one's place
            await refusal(grammars, gbnf(f"root ::= undefined{i}"))
        await grammars.compile(schema("a"))
        assert len(seen) == 72

    with_grammars(tiny_target, work)


def test_requests_for_one_schema_share_a_reader(tiny_target, monkeypatch):
    async def work(grammars):
        seen = counted(grammars, monkeypatch)
        first, second, third = (asyncio.ensure_future(grammars.compile(schema("a"), name)) for name in "abc")
        await asyncio.sleep(0)
        first.cancel()
        assert await second == await third
        assert len(seen) == 1 and not grammars._reading and not grammars._readers._asked
        with pytest.raises(asyncio.CancelledError):
            await first

    with_grammars(tiny_target, work)


def test_a_client_with_many_leaves_room_for_others(tiny_target):
    async def work(grammars):
        many = [asyncio.ensure_future(grammars.compile(schema(f"a{i}"), "hog")) for i in range(16)]
        await asyncio.sleep(0)
        failure = await refusal(grammars, schema("b"), "hog")
        assert failure.status == 429 and int(failure.headers["Retry-After"]) > 0
        assert (await grammars.compile(schema("b"), "other")).kind == "good"
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)
        assert (await grammars.compile(schema("c"), "hog")).kind == "good"

    with_grammars(tiny_target, work)


def test_time_is_that_of_the_reader(tiny_target):
    """A process that does not run, as on a busy machine, makes no grammar slow."""

    async def work(grammars):
        process = await process_of(grammars)
        process.send_signal(signal.SIGSTOP)
        reading = asyncio.ensure_future(grammars.compile(schema("a")))
        await asyncio.sleep(1.0)
        assert not reading.done()
        process.send_signal(signal.SIGCONT)
        assert (await reading).kind == "good"

    with_grammars(tiny_target, work, seconds=0.5)


def test_too_much_time_in_all(tiny_target):
    constraint = Constraint("schema", json.dumps([[{"properties": {f"p{i}": {} for i in range(300)}}]]), "tools")

    async def work(grammars):
        failure = await refusal(grammars, constraint)
        assert failure.status == 400 and failure.param == "tools"

    with_grammars(tiny_target, work, seconds=0.01)


def test_a_process_that_ends_is_started_again(tiny_target):
    async def work(grammars):
        process = await process_of(grammars)
        process.kill()
        assert (await grammars.compile(schema("a"))).kind == "good"
        process = grammars._readers._process
        process.send_signal(signal.SIGSTOP)  # it ends while it is asked
        reading = asyncio.ensure_future(grammars.compile(schema("b")))
        await asyncio.sleep(0.1)
        process.kill()
        assert (await reading).kind == "good"

    with_grammars(tiny_target, work)


def test_a_process_that_does_not_start(tiny_target, tmp_path, monkeypatch):
    """It is tried again after a pause, not at each request."""
    path = tmp_path / "model.gguf"

    async def work(grammars):
        with pytest.raises(Unavailable):
            await grammars.compile(schema("a"))
        shutil.copy(tiny_target, path)
        grammars._readers._earliest = time.monotonic() + 60.0
        with pytest.raises(Unavailable) as failure:
            await grammars.compile(schema("a"))
        assert 0 < failure.value.seconds <= 60 and grammars._readers._process is None
        grammars._readers._earliest = 0.0
        assert (await grammars.compile(schema("a"))).kind == "good"

    with_grammars(str(path), work)


def test_a_model_file_that_was_moved(tiny_target, tmp_path):
    """As the process may end, the file stays open."""
    path = shutil.copy(tiny_target, tmp_path / "model.gguf")

    async def work(grammars):
        process = await process_of(grammars)
        path.rename(tmp_path / "moved.gguf")
        process.kill()
        assert (await grammars.compile(schema("a"))).kind == "good"

    with_grammars(str(path), work)


def test_slices():
    """The client who had least, and of its grammars the one that had least."""
    turns, order = ReaderTurns(), []
    readers = [GrammarReader(n, whose) for n, whose in enumerate("aaaab")]
    for _ in range(8):
        chosen = turns.next(readers)
        for reader in readers:
            reader.is_running = reader in chosen
        order.append({reader.number for reader in chosen})
        turns.spend(readers, 1.0)
    n_slices = [sum(n in chosen for chosen in order) for n in range(5)]
    assert n_slices[4] >= 7 and max(n_slices[:4]) - min(n_slices[:4]) <= 1
    newcomer = GrammarReader(5, "a")
    readers.append(newcomer)
    assert newcomer in turns.next(readers)
    turns.spend([], 1.0)
    assert not turns.seconds


def test_the_server_keeps_apart_who_asks(server, monkeypatch):
    seen = []

    async def noting(constraint, whose, compiles=server.service.grammars.compile):
        seen.append(whose)
        return await compiles(constraint, whose)

    monkeypatch.setattr(server.service.grammars, "compile", noting)
    assert server.post("/v1/completions", prompt="x", grammar='root ::= "a"', max_tokens=2).status_code == 200
    assert seen == ["127.0.0.1"]
