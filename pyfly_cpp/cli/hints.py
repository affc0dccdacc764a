"""Names of other programs, and ours for them, in the errors for commands and options that are not known."""

from __future__ import annotations

from collections.abc import Iterable

import click

from pyfly_cpp.errors import did_you_mean

_HERE = {
    "run": "chat", "generate": "complete", "pull": "models fetch", "download": "models fetch", "list": "models list",
    "ls": "models list", "rm": "models remove", "delete": "models remove", "help": "--help",
    "-p": "complete PROMPT", "--prompt": "complete PROMPT", "--predict": "-n", "--n-predict": "-n",
    "--threads": "-t", "--gpu-layers": "-ngl", "--model-draft": "-d", "--system-prompt": "--system",
}  # fmt: skip
"""Commands and options, as they are called elsewhere and here."""


def _named_here(name: str) -> str:
    """` `run` is `chat` here.`; empty for names without another here."""
    here = f"chat {name}" if name.endswith(".gguf") else _HERE.get(name)
    return f" `{name}` is `{here}` here." if here else ""


class HintingGroup(click.Group):
    """Names the command that was meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise with_hint(error, self._behind_a_command(ctx, error.option_name)) from None

    def _behind_a_command(self, ctx: click.Context, option: str) -> str:
        """The first command that has the option; empty if none has."""
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and any(option in param.opts for param in command.params):
                return f" It follows a command: `{ctx.command_path} {name} {option}`."
        return ""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known and not ctx.resilient_parsing:
            hint = _named_here(args[0]) or did_you_mean(args[0], known) or f" Commands: {', '.join(known)}."
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


class _Hinted(click.NoSuchOption):
    """An error that names the option which was meant."""


def with_hint(error: click.NoSuchOption, otherwise: str = "") -> click.NoSuchOption:
    """The error, which names the option that was meant if it has another name here; `otherwise`: if it has none."""
    hint = _named_here(error.option_name) or otherwise
    if isinstance(error, _Hinted) or not hint:
        return error
    return _Hinted(error.option_name, f"{error.message}{hint}", ctx=error.ctx)


def one_prompt(context: click.Context, _: click.Parameter, words: Iterable[str]) -> str | None:
    """The prompt among the arguments of a command, None if there is none. Raises UsageError for several words."""
    given = [*words]
    if len(given) > 1 and not context.resilient_parsing:
        raise click.UsageError("the prompt is several arguments; put it in quotes.", context)
    return given[0] if given else None
