"""Grammars and schemas of strangers: read and tried in processes of their own, for so long and no longer, and known
then."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyfly_cpp.grammar.readers import GrammarReaders
from pyfly_cpp.grammar.schemas import SchemaGrammar
from pyfly_cpp.serve.api_errors import ApiError, bad_request

_N_KEPT = 64
_N_REFUSED = 1024
_MOST_OF_ONE, _MOST_PENDING = 16, 64
"""Constraints of one client, and of all, that are being read."""


class Constraint(NamedTuple):
    """The grammar that a text must follow."""

    kind: str
    """`"gbnf"`, `"schema"` (a list of `Framed` as JSON: it follows one of them), or `"good"`: the text of a
    `SchemaGrammar` that was tried."""
    text: str
    param: str = ""
    """The field of the request that it comes from."""
    is_repeated: bool = False
    """Whether it may follow a schema several times."""
    loose: tuple[str, ...] = ()
    """The keywords of its schemas that a good grammar does not enforce."""
    is_by_character: bool = False
    """As of a good grammar."""

    def for_sampler(self) -> SchemaGrammar:
        """A grammar that was tried, for a sampler."""
        return SchemaGrammar(self.text, is_by_character=self.is_by_character)

    def or_else(self, other: Constraint) -> Constraint:
        """What follows either, both of schemas."""
        both = [*json.loads(self.text), *json.loads(other.text)]
        return self._replace(text=json.dumps(both), is_repeated=False)


@dataclass
class _Reading:
    """A constraint that is being read."""

    constraint: Constraint
    task: asyncio.Task[dict[str, Any]]
    whose: str
    n_waiting: int = 0
    """Requests that wait for it."""


class Grammars:
    """Turns constraints into grammars that are known to be harmless. It belongs to one event loop."""

    def __init__(self, model_path: str, max_bytes: int, seconds: float) -> None:
        """
        Args:
            model_path: The file of the vocabulary that they are tried with.
            max_bytes: Most bytes of a grammar.
            seconds: Processor time for one.
        """
        self._readers = GrammarReaders(model_path, max_bytes)
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._known: OrderedDict[Constraint, Constraint] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # the words of an error, by the digest of a constraint
        self._reading: dict[Constraint, _Reading] = {}

    def start(self) -> None:
        """Makes the process ready, in the background."""
        self._readers.start()

    async def compile(self, constraint: Constraint, whose: str = "") -> Constraint:
        """The grammar of a constraint. Each of the clients (`whose`) has the same share of the time for reading.

        Raises:
            ApiError: it is too large, too slow, or cannot be read; or too many are being read.
            Unavailable: grammars cannot be read now.
        """
        if constraint.kind == "good":
            return constraint
        if len(constraint.text.encode("utf-8")) > self._max_bytes:
            raise bad_request(
                f"{constraint.param} has more than {self._max_bytes} bytes; make it smaller.", constraint.param
            )
        if "\0" in constraint.text:
            raise bad_request(f"{constraint.param} has a NUL character; leave it out.", constraint.param)
        digest = hashlib.sha256(json.dumps(constraint).encode()).digest()
        good, error = self._known.get(constraint), self._refused.get(digest)
        if good is None and error is None:
            answer = await self._answer(constraint, whose)
            if answer.get("passes"):
                what = f"{constraint.param} {answer['error']}."
                raise ApiError(429, what, param=constraint.param, code="queue_full", headers={"Retry-After": "5"})
            error = answer.get("error")
            if error is None:
                grammar = SchemaGrammar(**answer)
                good = Constraint(
                    "good", grammar.text, constraint.param, loose=tuple(grammar.loose),
                    is_by_character=grammar.is_by_character,
                )  # fmt: skip
        if good is None:
            assert error is not None
            _keep(self._refused, digest, error, _N_REFUSED)
            raise bad_request(f"{constraint.param} {error}.", constraint.param)
        _keep(self._known, constraint, good, _N_KEPT)
        return good

    def close(self) -> None:
        """Ends the process."""
        self._readers.close()

    def _answer(self, constraint: Constraint, whose: str) -> asyncio.Future[dict[str, Any]]:
        """Its answer; requests for the same constraint share one. Raises ApiError: too many are being read."""
        reading = self._reading.get(constraint)
        if reading is None:
            self._require_room(whose)
            task = asyncio.ensure_future(self._readers.read(constraint._asdict(), whose, self._seconds))
            reading = self._reading[constraint] = _Reading(constraint, task, whose)
        waiting = asyncio.shield(reading.task)
        reading.n_waiting += 1
        waiting.add_done_callback(lambda _: self._leave(reading))
        return waiting

    def _leave(self, reading: _Reading) -> None:
        """One request less waits for it; without any it is given up."""
        reading.n_waiting -= 1
        if not reading.n_waiting:
            del self._reading[reading.constraint]
            reading.task.cancel()

    def _require_room(self, whose: str) -> None:
        n_own = sum(reading.whose == whose for reading in self._reading.values())
        if n_own >= _MOST_OF_ONE or len(self._reading) >= _MOST_PENDING:
            raise ApiError(429, "too many grammars are waiting to be read; try again later.", code="queue_full",
                           headers={"Retry-After": "5"})  # fmt: skip


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Makes an entry the newest; the oldest go."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
