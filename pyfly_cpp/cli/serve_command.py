"""`pyfly-cpp serve`: the OpenAI protocol, for many clients at a time."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

import click

from pyfly_cpp.cli.headings import HeadedCommand, access, declares, limits, more, number
from pyfly_cpp.cli.kinds import PARALLEL_COUNT, WORDS, Real
from pyfly_cpp.cli.loading import MODEL_ARGUMENT
from pyfly_cpp.cli.options import Options, shared_options
from pyfly_cpp.cli.terminal import note
from pyfly_cpp.decoding.drafters import PromptLookup
from pyfly_cpp.errors import counted
from pyfly_cpp.llama.fly_batch import FlyBatch
from pyfly_cpp.machine.threads import AUTO
from pyfly_cpp.models.ollama import shown_name
from pyfly_cpp.serve.settings import RequestLimits, Settings

_LONGEST_PAUSE = 0.2  # seconds, by which a prompt holds up the next token of another request
_LONGEST_END = 5.0  # seconds for what is written at the end
_MOST_KEYS_BYTES = 2**16
_MOST_TEMPLATE_BYTES = 2**20
_KEY = "PYFLY_API_KEY"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


_MOST = {
    "tokens": ("max_tokens", click.IntRange(1), "Maximum answer length in tokens, even if a request wants more."),
    "seconds": ("max_seconds", Real(0.1), "Time limit for an answer in seconds."),
    "waiting": ("max_waiting", click.IntRange(0), "Requests that wait for their turn; more are turned away."),
    "texts": ("max_answers", click.IntRange(1), "Maximum number of answers to a request: prompts times n."),
    "body": ("max_body", click.IntRange(1024), "Maximum size of a request in bytes."),
}
"""Options `--most-...`, each with the field of `RequestLimits` that it sets."""

_OPTIONS = [
    click.option("--host", default="127.0.0.1", metavar="ADDRESS",
                 help="Address to listen on; others than this machine's own need a key or --no-auth."),
    number("--port", kind=click.IntRange(0, 65535), default=8080, help="Port to listen on; 0: any that is free."),
    number("--parallel", kind=PARALLEL_COUNT, default=AUTO,
           help="Requests at a time; auto: as many as fit well in memory, 8 at most."),
    click.option("--embeddings", is_flag=True,
                 help="Also serve embeddings, at /v1/embeddings; takes the memory of one more request."),
    more("--pooling", type=click.Choice(["mean", "cls", "last", "none"]),
         help="How --embeddings makes one vector of a text; none: /embeddings has one for each token.  "
         "[default: that of the model's file, or mean]"),
    more("--chat-template", metavar="NAME|TEXT",
         help="Chat template instead of the model's own: in Jinja, or the name of one of llama.cpp's."),
    more("--chat-template-file", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
         help="File of a chat template in Jinja."),
    number("--reasoning-budget", declare=more, kind=click.IntRange(-1), default=-1,
           help="Maximum tokens of thoughts, unless a request sets its own limit; 0: none; -1: no limit."),
    more("--alias", metavar="NAME,...", type=WORDS,
         help="Names of the model for clients; answers use the first.  [default: the file's name]"),
    more("--tags", metavar="WORD,...", type=WORDS, help="Tags of the model, which /v1/models shows."),
    access("--api-key", multiple=True, metavar="KEY", help="Key that clients must send; can be repeated. Other "
           f"users see it in the list of processes; better: --api-key-file, or {_KEY} in the environment."),
    click.option("--api-key-file", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
                 help="File of keys that clients must send, one on each line."),
    access("--no-auth", is_flag=True, help="Serve other machines without a key."),
    access("--cors", "origins", multiple=True, metavar="ORIGIN",
           help="Web pages of this origin may send requests; can be repeated; *: all."),
    access("--allow-host", "hosts", multiple=True, metavar="NAME",
           help="Host name that clients use, besides addresses and localhost; can be repeated; *: any."),
    more("--log", type=click.Choice(["none", "requests", "texts"]), default="none",
         help="Log requests on stderr, a line each; texts: with their prompts and answers."),
    number("--grace", declare=limits, kind=Real(0, 3600), metavar="SECONDS", default=10.0,
           help="How long running answers may continue when the server is stopped."),
    *(
        number(f"--most-{name}", declare=limits, kind=kind, default=getattr(RequestLimits(), field), help=text)
        for name, (field, kind, text) in _MOST.items()
    ),
]  # fmt: skip


@click.command(
    "serve",
    cls=HeadedCommand,
    short_help="Serve a model to programs, and on a web page.",
    epilog="Example: pyfly-cpp serve --model target.gguf --draft draft.gguf --parallel 4",
)
@MODEL_ARGUMENT
@declares(_OPTIONS)
@shared_options()
def command(
    options: Options,
    host: str,
    port: int,
    parallel: int | str,
    alias: tuple[str, ...] | None,
    tags: tuple[str, ...] | None,
    chat_template: str | None,
    chat_template_file: str | None,
    api_key: tuple[str, ...],
    api_key_file: str | None,
    no_auth: bool,
    **given: Any,
) -> None:
    """Serve a model: to programs that speak the OpenAI protocol or Anthropic's, and to your browser."""
    try:
        from pyfly_cpp.serve.security import is_loopback
        from pyfly_cpp.serve.server import open_socket, serve
    except ModuleNotFoundError as error:
        raise ValueError(f"serve needs {error.name}: pip install 'pyfly-cpp[server]'.") from error
    for origin in given["origins"]:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise click.UsageError(f"--cors {origin!r} is not an origin; write it like http://localhost:3000, or *.")
    most = RequestLimits(**{field: given.pop(f"most_{name}") for name, (field, *_) in _MOST.items()})
    keys = _keys(api_key, api_key_file)
    if not keys and not no_auth and not is_loopback(host):
        raise click.UsageError(
            f"--host {host} is open to other machines: give a key (--api-key-file, {_KEY}), or --no-auth."
        )
    template = _template(chat_template, chat_template_file)
    bound = open_socket(host, port)  # before the model is loaded: a port in use is known at once
    try:
        n_parallel = options.models.choose_parallel() if isinstance(parallel, str) else parallel
        batch = options.load(FlyBatch, n_parallel, longest_pause=_LONGEST_PAUSE)
        with batch:
            lookups = [part for part in batch.model.resolved.drafters if isinstance(part, PromptLookup)]
            if len(keys) > 1 and any(lookup.memory_file is not None for lookup in lookups):
                raise ValueError("a --lookup-memory is not kept apart by API keys; give one key, or leave it out.")
            sampling = {k: v for k, v in options.sampling.items() if k not in ("seed", "max_tokens")}
            of_chat = options.for_chat(batch.model.metadata).sampling
            page_sampling = {k: v for k, v in of_chat.items() if v != options.sampling[k]}
            model, shown = options.models.model, shown_name(options.models.model)
            name, *aliases = alias or [model.stem if shown == model.name else shown]
            settings = Settings(
                name=name, aliases=tuple(aliases), tags=tuple(tags or ()), host=host, keys=keys,
                page_sampling=page_sampling,
                chat_template=template, seed=options.sampling["seed"],
                default_max_tokens=options.sampling["max_tokens"], sampling=sampling,
                limits=most, **given,
            )  # fmt: skip
            address = f"[{host}]" if ":" in host else host
            url = f"http://{address}:{bound.getsockname()[1]}"

            def tell() -> None:
                with contextlib.suppress(OSError):  # a full disk
                    note(
                        f"{settings.name} is served at {url}/v1 to programs, and at {url} to a browser. Ctrl-C stops. "
                        f"Drafter: {' and '.join(map(str, batch.model.resolved.drafters)) or 'none'}. Gate: "
                        f"{batch.decoding.gate}. At most {counted(batch.n_parallel, 'request')} at a time, each "
                        f"with a context of {batch.n_ctx} tokens."
                    )

            def tell_wait() -> None:
                with contextlib.suppress(OSError):
                    note(f"Running answers may take {settings.grace:g} s more; Ctrl-C again ends them now.")

            if not serve(batch, settings, bound, tell, tell_wait):
                _leave(batch)
    finally:
        bound.close()


def _leave(batch: FlyBatch) -> None:
    """Ends the process while a thread of it still tokenizes, so that the model cannot be freed."""
    with contextlib.suppress(Exception):
        drafters = functools.partial(setattr, batch.model.decoder, "drafters", [])  # what they remember is written
        batch.between_steps(drafters).result(_LONGEST_END)
    sys.stderr.flush()
    os._exit(0)


def _template(text: str | None, file: str | None) -> str:
    """The chat template; empty: the model's own."""
    if file is None:
        return text or ""
    if text is not None:
        raise click.UsageError("--chat-template and --chat-template-file exclude each other; leave one out.")
    if Path(file).stat().st_size > _MOST_TEMPLATE_BYTES:
        raise ValueError(f"{file} is too large for a chat template.")
    return Path(file).read_text(encoding="utf-8-sig")


def _keys(given: tuple[str, ...], file: str | None) -> tuple[str, ...]:
    """All keys: of the options, the file, the environment."""
    keys = [*(key.strip() for key in given), os.environ.get(_KEY, "").strip()]  # as those of requests are
    if file is not None:
        if Path(file).stat().st_size > _MOST_KEYS_BYTES:
            raise ValueError(f"{file} is too large for a file of keys; write one key on a line.")
        text = Path(file).read_text(encoding="utf-8-sig", errors="surrogateescape")
        found = [line.strip() for line in text.splitlines()]
        if not any(found):
            raise ValueError(f"{file} has no key; write one key on a line.")
        keys += found
    if any(not key.strip() for key in given):
        raise ValueError("an --api-key is empty; give a key.")
    return tuple(dict.fromkeys(key for key in keys if key))
