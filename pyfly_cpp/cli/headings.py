"""Commands whose help has the options that people use first at its top and the others under headings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click


class _HeadedOption(click.Option):
    def __init__(self, *names: Any, heading: str | None = None, **given: Any) -> None:
        super().__init__(*names, **given)
        self.heading = heading


def _headed(heading: str) -> Callable[..., Callable[[Any], Any]]:
    """A `click.option` whose options stand under this heading in the help of a `HeadedCommand`."""
    return functools.partial(click.option, cls=_HeadedOption, heading=heading)


drafting = _headed("Drafting")
acceptance = _headed("Acceptance")
sampling = _headed("Sampling")
machine = _headed("Model and machine")


class HeadedCommand(click.Command):
    """Shows the options without a heading first, then each heading with its own, as they are declared."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(param, "heading", None) or "Options", []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)
