"""The command line, `pyfly-cpp COMMAND`: one file per command.

Answers go to stdout, everything else to stderr. Exit codes: 0 done, 1 an error (one line; PYFLY_DEBUG=1 brings the
traceback back), 2 wrong usage.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import click

from pyfly_cpp._version import __version__
from pyfly_cpp.cli.hints import HintingGroup, with_hint
from pyfly_cpp.errors import NamingError

_COMMANDS = {
    "chat": ("chat_command", "Talk to a model."),
    "demo": ("demo", "See one answer without drafts and with them."),
    "complete": ("complete", "Answer a prompt: argument or stdin to stdout."),
    "serve": ("serve_command", "Serve a model to programs, and on a web page."),
    "bench": ("bench", "Measure the speed without drafts and with them."),
    "eval": ("evaluate", "Measure the quality of answers, and the speed, on a task."),
    "explain": ("explain", "Write a page that shows how each token was produced."),
    "heads": ("heads_command", "Train a head that drafts for a model."),
    "doctor": ("doctor", "Show versions and devices, and whether a draft suits a model."),
    "models": ("models_command", "List, fetch, pair and remove models, or make a draft of one."),
}
"""For each command its module in this package, imported when the command is used, and its line in the help."""

_OPTIONS = {
    "draft_max": "--draft-max",
    "n_ctx": "--n-ctx",
    "n_batch": "--n-batch",
    "n_parallel": "--parallel",
    "room": "--parallel or --n-ctx",
    "flash_attn": "--flash-attn",
    "type_v": "--cache-type-v",
    "verbose": "--verbose",
    "head": "with --draft",
    "cross": "--drafter cross",
    "draft_model": "--drafter draft",
    "dflash": "--drafter dflash",
    "dspark": "--drafter dspark",
    "draft": ", or give it with --draft",
}
"""What errors name (`NamingError`), as options."""

_MAX_CHARS = 1000
"""The longest error that is shown."""


class _Commands(HintingGroup):
    """Imports a command when it is used, and turns errors into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"pyfly_cpp.cli.{_COMMANDS[cmd_name][0]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise with_hint(error) from None
        except (KeyboardInterrupt, click.Abort):
            click.echo(f"Interrupted. {ctx.meta.get(_INTERRUPTED, '')}".rstrip(), err=True)
            ctx.exit(130)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        from pyfly_cpp.cli.headings import Formatter

        warnings.showwarning = _show_warning
        click.Context.formatter_class = Formatter
        try:
            return super().main(*args, **kwargs)
        except (ValueError, RuntimeError, OSError, MemoryError) as error:  # a closed pipe is handled by click
            if os.environ.get("PYFLY_DEBUG"):
                raise
            from pyfly_cpp.cli.terminal import folded

            click.echo(folded(f"Error: {describe(error)}", sys.stderr), err=True)
            _give_up("stdout")
            sys.exit(1)


_INTERRUPTED = "pyfly_cpp.interrupted"


def if_interrupted(remedy: str) -> None:
    """Shows this if Ctrl-C stops the running command."""
    click.get_current_context().meta[_INTERRUPTED] = remedy


def in_options(error: BaseException) -> str:
    """The text of an error, which names options instead of arguments."""
    return error.in_words(_OPTIONS) if isinstance(error, NamingError) else str(error)


def describe(error: BaseException) -> str:
    """An error as one line for stderr; it may quote what somebody wrote into a file."""
    from pyfly_cpp.cli.terminal import shown

    text = " ".join(in_options(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    return shown(text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} ...", sys.stderr)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as one line, without the line of our code that it comes from."""
    from pyfly_cpp.cli.terminal import folded, shown

    click.echo(folded(shown(f"Warning: {' '.join(str(message).split())}", sys.stderr), sys.stderr), err=True)


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80, "show_default": True},
    epilog="Example: pyfly-cpp chat -m target.gguf -d draft.gguf\n\n\b\n"
    'Tab completion (bash): eval "$(_PYFLY_CPP_COMPLETE=bash_source pyfly-cpp)"',
)
@click.version_option(__version__, message="pyfly-cpp %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run GGUF models faster: something cheap guesses the next tokens, and the model checks them in one step."""
    from pyfly_cpp.cli.terminal import is_dumb

    if is_dumb():
        ctx.color = False


def _give_up(name: str) -> None:
    """What cannot be written to stdout or stderr (a full disk) is lost; Python does not tell it again at the end, with
    an exit code of its own."""
    try:
        getattr(sys, name).flush()
    except (OSError, ValueError):
        setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits."""
    atexit.register(_give_up, "stderr")
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us: /dev/null takes its descriptor
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    cli.main(args=None if arguments is None else list(arguments), prog_name="pyfly-cpp")
