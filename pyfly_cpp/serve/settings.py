"""How a server is set up: the requests it takes, from whom, and its log."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request, and of all together."""

    max_tokens: int = 4096
    """Tokens of one answer."""
    max_seconds: float = 600.0
    """For one answer, its turn included: what it has by then is all. As long may it wait for its turn."""
    max_answers: int = 128
    """Answers to one request: prompts times n."""
    max_inputs: int = 2048
    """Texts of one request for vectors, as many as OpenAI takes."""
    max_waiting: int = 256
    """Answers that wait for their turn; more are turned away with 429."""
    max_body: int = 4 * 2**20
    """Bytes of a request."""
    max_depth: int = 64
    """Arrays and objects within each other in a request."""
    max_grammar: int = 2**16
    """Bytes of a grammar, or of a schema and the grammar that comes of it."""
    grammar_seconds: float = 5.0
    """Of processor time, for reading and trying it."""
    head_seconds: float = 20.0
    """Until a new connection has sent the head of a request; of a later one, from its first byte on."""
    read_seconds: float = 60.0
    """Until a request has come whole, and for a client to take 64 KiB of what it is sent, or all of it."""
    silent_seconds: float = 10.0
    """Longest silence of a stream, whose client is sent comments while it waits."""


@dataclass(frozen=True)
class Settings:
    """Everything about a server but its model."""

    name: str
    """Name of the model, as clients see it."""
    aliases: tuple[str, ...] = ()
    """Other names of it."""
    tags: tuple[str, ...] = ()
    """Words about it, for clients that choose."""
    host: str = "127.0.0.1"
    keys: tuple[str, ...] = ()
    """API keys; any of them is good. None: nobody is asked."""
    origins: tuple[str, ...] = ()
    """Origins of web pages elsewhere that may ask (CORS); `*`: all."""
    hosts: tuple[str, ...] = ()
    """Names besides localhost under which the server is known; `*`: all."""
    log: str = "none"
    """Lines on stderr: none, requests (no word of prompts and answers), texts (with them)."""
    grace: float = 10.0
    """Seconds that answers have to finish when the server is told to stop."""
    default_max_tokens: int = 1024
    """Longest chat answer by default, tokens; 0: as the context allows."""
    embeddings: bool = False
    """Whether vectors of texts are served, for which there is a context in addition to the batch's."""
    pooling: str | None = None
    """Makes a vector of the rows of a text: mean, cls, last, or none (`POST /embeddings` then gives all rows); None:
    the choice of the model's file."""
    chat_template: str = ""
    """In place of the model's own: in Jinja, or the name of one that llama.cpp has."""
    reasoning_budget: int = -1
    """Most tokens of thoughts if a request does not limit them; 0: none; -1: no limit."""
    seed: int | None = None
    """Seed of requests without one; None: another for each."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Sampling of requests that do not set it."""
    page_sampling: dict[str, float] = field(default_factory=dict)
    """Sampling that the page asks for instead, unless its reader sets it: fields of requests."""
    limits: RequestLimits = RequestLimits()

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model."""
        return self.name, *self.aliases
