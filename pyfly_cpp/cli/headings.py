"""Commands whose --help has the options that people use first, and --help-all also the others, under headings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import click

from pyfly_cpp.cli.kinds import Real

Function = TypeVar("Function", bound=Callable[..., Any])
Declared = Callable[[Any], Any]
"""An option, as `click.option` makes it."""

_FIRST, *_OTHERS = _HEADINGS = (
    "Options", "More options", "Access", "Limits", "Thresholds", "Drafting", "Acceptance", "Sampling",
    "Model and machine",
)  # fmt: skip


_MORE = _OTHERS[0]


class _HeadedOption(click.Option):
    def __init__(self, *names: Any, heading: str, **given: Any) -> None:
        super().__init__(*names, **given)
        self.heading = heading


more, access, limits, thresholds, drafting, acceptance, sampling, machine = (
    functools.partial(click.option, cls=_HeadedOption, heading=heading) for heading in _OTHERS
)
"""As `click.option`, for options that only --help-all shows, under a heading."""


def number(*names: str, kind: Any, declare: Any = click.option, **given: Any) -> Callable[[Function], Function]:
    """An option that takes a number of this kind."""
    declared: Callable[[Function], Function]
    declared = declare(*names, type=kind, **{"metavar": "X" if isinstance(kind, Real) else "N", **given})
    return declared


def declares(options: Sequence[Declared]) -> Callable[[Function], Function]:
    """Gives a command these options, in this order."""

    def declare(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return declare


_HYPHEN = "\ue000"  # until the lines are broken


class Formatter(click.HelpFormatter):
    """Breaks the lines of a help between words, and not at hyphens: names of options and gates are to be copied."""

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", _HYPHEN))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(name, text.replace("-", _HYPHEN)) for name, text in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(_HYPHEN, "-")


_ALL = "pyfly_cpp.help_all"


def _show_all(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


class HeadedCommand(click.Command):
    """Shows the options without a heading, and with --help-all also those of each heading, as they are declared.

    Args:
        usual: Long names of the options to show, if not those without a heading.
    """

    def __init__(self, *args: Any, usual: Collection[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._usual = {*usual, "--help", "--help-all"} if usual else ()
        self.params.append(
            click.Option(
                ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all,
                help="Show all options, also those that few need.",
            )
        )  # fmt: skip

    def _heading(self, param: click.Parameter) -> str:
        if not self._usual:
            return getattr(param, "heading", _FIRST)
        return _FIRST if not self._usual.isdisjoint(param.opts) else getattr(param, "heading", _MORE)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {heading: [] for heading in _HEADINGS}
        for param in self.get_params(ctx):
            if isinstance(param, click.Argument):  # named in the first line
                continue
            record = param.get_help_record(ctx)
            if record is not None:
                sections[self._heading(param)].append(record)
        for heading, records in sections.items():
            if records and (heading == _FIRST or _ALL in ctx.meta):
                with formatter.section(heading):
                    formatter.write_dl(records)
