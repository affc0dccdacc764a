"""`pyfly-cpp complete`: a prompt in, its answer or its continuation out; for scripts."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import llama_cpp
from llama_cpp.llama_grammar import LLAMA_GRAMMAR_DEFAULT_ROOT, LlamaGrammar

from pyfly_cpp.cli import prompt_cache as cache
from pyfly_cpp.cli.headings import HeadedCommand, more
from pyfly_cpp.cli.hints import one_prompt
from pyfly_cpp.cli.kinds import FILE
from pyfly_cpp.cli.loading import NO_TEMPLATE, Models, is_full, reading
from pyfly_cpp.cli.options import Options, shared_options
from pyfly_cpp.cli.terminal import note, warn, write
from pyfly_cpp.cli.text import SOME_TEXT, TEXT, piped_text
from pyfly_cpp.decoding.data import drafter_as_data
from pyfly_cpp.errors import ArgumentError, ContextFullError
from pyfly_cpp.grammar.response_format import schema_grammar
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.machine.files import file_text

_USUAL = (
    "--chat", "--stop", "--file", "--json", "--stats", "--model", "--draft", "--n-ctx", "--n-threads", "--n-gpu-layers",
    "--max-tokens", "--temperature", "--seed",
)  # fmt: skip


@click.command(
    "complete",
    cls=HeadedCommand,
    usual=_USUAL,
    short_help="Answer a prompt: argument or stdin to stdout.",
    epilog="Example: pyfly-cpp complete 'Summarise this.' -m target.gguf -f notes.md",
)
@click.argument("prompt", metavar="[PROMPT]", nargs=-1, type=TEXT, callback=one_prompt)
@click.option("--chat/--raw", "chat", default=None,
              help="Answer by the chat template, or continue the text.  [default: chat if there is one]")  # fmt: skip
@click.option("--system", type=TEXT, metavar="TEXT", help="System prompt; not with --raw.")
@more("--stop", multiple=True, type=SOME_TEXT, metavar="TEXT", help="Stop before this text; can be repeated.")
@click.option("-f", "--file", "files", multiple=True, type=FILE,
              help="Put the text of this file before PROMPT; can be repeated.")  # fmt: skip
@more("--grammar", type=FILE, help="GBNF grammar that the text must follow.")
@click.option("--json-schema", type=FILE, help="JSON schema that the text must follow, or its text: '{...}'.")
@more("--prompt-cache", type=FILE, help="Keep the evaluated prompt here, for prompts that begin alike.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: text, finish_reason, usage, stats, settings.")
@more("--stats", "show_stats", is_flag=True, help="Print a line of statistics on stderr.")
@shared_options()
def command(
    options: Options,
    prompt: str | None,
    chat: bool | None,
    system: str | None,
    stop: tuple[str, ...],
    files: tuple[str, ...],
    grammar: str | None,
    json_schema: str | None,
    prompt_cache: str | None,
    as_json: bool,
    show_stats: bool,
) -> None:
    """Answer PROMPT; with --raw, or if the model has no chat template, continue it. Piped text and the text of --file
    are put before it, on lines of their own."""
    if system is not None and chat is False:
        raise click.UsageError("--raw only continues the text; leave out --raw or --system.")
    if grammar is not None and json_schema is not None:
        raise click.UsageError("give either --grammar or --json-schema, not both.")
    parts = [*map(file_text, files), piped_text(), None if prompt == "-" else prompt]
    prompt = "\n".join(part for part in parts if part)
    if not prompt:
        raise click.UsageError("the prompt is empty; give a PROMPT, a --file, or pipe text in.")
    gbnf = None if grammar is None else _grammar_text(grammar)
    rules = _schema(json_schema) if gbnf is None else LlamaGrammar.from_string(gbnf, verbose=False)
    llm = options.load(FlyLlama)
    try:
        if gbnf is not None:
            _require_parsed(llm, gbnf, repr(grammar))
        if chat is None:
            chat = options.models.formats_chats(llm)
            if system is not None and not chat:
                raise ValueError(
                    "the model's file has no chat template for --system; name a format with --chat-format, or leave "
                    "--system out."
                )
        if chat and not options.models.formats_chats(llm):
            warn(NO_TEMPLATE)
        if prompt_cache is not None:
            cache.load(Path(prompt_cache), llm)
        request = {**options.request(), "stop": list(stop), "grammar": rules}
        text, finish_reason, usage = _run(llm, prompt, system, chat, request, as_json, options.models)
        if as_json:
            result = {
                "text": text,
                "finish_reason": finish_reason,
                "usage": usage,
                "stats": llm.stats.as_dict(),
                "settings": {**_settings(llm, options, chat), "seed": request["seed"]},
            }
            write(json.dumps(result, ensure_ascii=False) + "\n")
        elif not text.endswith("\n"):
            click.echo()
        is_asked = usage["completion_tokens"] == request["max_tokens"]
        if finish_reason == "length" and not is_asked and is_full(llm):
            note("(cut off: the context is full; raise --n-ctx)")
        if prompt_cache is not None:
            cache.save(Path(prompt_cache), llm)
        if show_stats:
            seed = "" if request["seed"] is None else f"; seed {request['seed']}"
            note(f"{llm.stats.summary()}{seed}")
    finally:
        llm.close()


def _run(
    llm: FlyLlama, prompt: str, system: str | None, chat: bool, request: dict[str, Any], quiet: bool, models: Models
) -> tuple[str, str, dict[str, int]]:
    """(text, why it ended, usage); unless quiet, it writes the text as it comes, and knows of the usage only what the
    answer has."""
    what: Any = prompt
    if chat:
        what = [{"role": "system", "content": system}] if system else []
        what.append({"role": "user", "content": prompt})
    texts: list[str] = []
    with reading(llm) as bar:
        try:
            if quiet:
                response: Any = (llm.create_chat_completion if chat else llm.create_completion)(what, **request)
                choice = response["choices"][0]
                text = (choice["message"]["content"] or "") if chat else choice["text"]
                return text, choice["finish_reason"], response["usage"]
            for piece in (llm.write_chat if chat else llm.write)(what, **request):
                bar.stop()
                texts.append(piece.text)
                write(piece.text)
        except ContextFullError as error:
            if error.n_prompt is None:
                raise
            raise ValueError(
                f"the prompt has {error.n_prompt} tokens and the context holds {models.room(llm)}; shorten it, or "
                "raise --n-ctx."
            ) from error
    return "".join(texts), str(piece.finish), {"completion_tokens": piece.n_tokens}


def _settings(llm: FlyLlama, options: Options, chat: bool) -> dict[str, Any]:
    drafters = llm.resolved.drafters
    return {
        **options.models.arguments,
        **options.sampling,
        "model": llm.model_path,
        "drafter": [str(drafter) for drafter in drafters],
        "drafters": [drafter_as_data(drafter) for drafter in drafters],
        "draft_max": llm.draft_max,
        "adaptive": llm.adaptive,
        "gate": str(llm.gate),
        "window": str(llm.window),
        "n_ctx": llm.n_ctx(),
        "n_threads": llm.n_threads,
        "chat": chat,
    }


def _grammar_text(file: str) -> str:
    text = file_text(file)
    if not text.strip():
        raise click.UsageError(f"the grammar {file!r} is empty; write its rules, or leave --grammar out.")
    return text


def _schema(json_schema: str | None) -> Any:
    """The grammar of --json-schema."""
    if json_schema is None:
        return None
    if json_schema.lstrip().startswith("{"):
        return schema_grammar(json_schema, "the text of --json-schema")
    return schema_grammar(file_text(json_schema), repr(json_schema))


def _require_parsed(llm: FlyLlama, rules: str, name: str) -> None:
    """Raises ValueError if llama.cpp cannot parse this grammar, without what it prints about it then."""
    with _stderr_nowhere() if not llm.verbose else contextlib.nullcontext():
        sampler = llama_cpp.llama_sampler_init_grammar(
            llama_cpp.llama_model_get_vocab(llm.model), rules.encode(), LLAMA_GRAMMAR_DEFAULT_ROOT.encode()
        )
    if not sampler:
        raise ArgumentError(f"llama.cpp cannot parse the grammar {name}; correct its rules; {{verbose}} shows where.")
    llama_cpp.llama_sampler_free(sampler)


@contextlib.contextmanager
def _stderr_nowhere() -> Iterator[None]:
    """A block in which nothing that C prints to stderr is seen."""
    try:
        before = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
