"""Kinds of values that options of the command line take."""

from __future__ import annotations

import math
from typing import Any

import click

from pyfly_cpp.decoding.gates import parse_gate
from pyfly_cpp.machine.threads import AUTO


class GateType(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A gate in its written form."""

    name = "gate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return parse_gate(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


class CountOrAuto(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number from 1 on of what `things` names, or "auto"."""

    def __init__(self, name: str, things: str) -> None:
        self.name = name
        self._things = things

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == AUTO:
            return AUTO
        try:
            return int(click.IntRange(min=1).convert(value, param, ctx))
        except click.BadParameter:
            self.fail(f"{value!r} is not a number of {self._things} from 1 on, or 'auto'.", param, ctx)


THREAD_COUNT = CountOrAuto("threads", "threads")
PARALLEL_COUNT = CountOrAuto("parallel", "texts")


class Renamed(click.Option):
    """An option that still takes its old names, which the help does not show: all but the first long one."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        every = self.opts
        first = next(name for name in every if name.startswith("--"))
        self.opts = [name for name in every if name == first or not name.startswith("--")]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = every


class Shares(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Numbers with commas between them, none below 0."""

    name = "shares"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            shares = tuple(map(float, str(value).split(",")))
        except ValueError:
            shares = ()
        if not shares or not all(0 <= share < math.inf for share in shares) or not sum(shares):
            self.fail(f"{value!r} is not a list of shares; write one number for each GPU, such as 3,1.", param, ctx)
        return shares


SHARES = Shares()


class ParallelCounts(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Numbers of texts at once, with commas between them; each once, in ascending order."""

    name = "parallel"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            number: Any = click.IntRange(min=1)
            return tuple(sorted({int(number.convert(part, param, ctx)) for part in str(value).split(",")}))
        except click.BadParameter:
            self.fail(f"{value!r} is not a number of texts from 1 on, or several like 1,4,8.", param, ctx)


def _described(kind: click.IntRange | click.FloatRange, described: str) -> str:
    """A range for the help: nothing where there is no bound, of which click makes `x<=None`."""
    return "" if kind.min is None and kind.max is None else described


class Int(click.IntRange):
    """An integer that fits into C's int."""

    def _describe_range(self) -> str:
        return _described(self, super()._describe_range())

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not -(2**31) <= number < 2**31:
            self.fail(f"{number} is too large; the largest is {2**31 - 1}.", param, ctx)
        return number


class Real(click.FloatRange):
    """A number: neither infinite nor NaN."""

    def _describe_range(self) -> str:
        return _described(self, super()._describe_range())

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


COUNT = Int(min=1)
SIZE = Int(min=0)
SEED: Any = click.IntRange(0, 2**32 - 1)
