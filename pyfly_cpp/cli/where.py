"""The options that say where and how models are evaluated: on which devices and machines (docs/rpc.md), by which
kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import click

from pyfly_cpp.cli.headings import machine
from pyfly_cpp.cli.kinds import SHARES
from pyfly_cpp.decoding.drafters import AnyDrafter, DraftModel, OwnDrafter, as_given, require_drafters
from pyfly_cpp.machine.kernels import CHOICES, VARIABLE
from pyfly_cpp.machine.rpc import split_address

NOT_SAFE = "not for open networks: nothing is encrypted, and nobody is asked for a password"


@dataclass(frozen=True)
class Where:
    """These options as given; None: not."""

    rpc: tuple[str, ...] | None = None
    devices: tuple[str, ...] | None = None
    tensor_split: tuple[float, ...] | None = None
    draft_devices: tuple[str, ...] | None = None

    @classmethod
    def take(cls, given: dict[str, Any]) -> Where:
        """Out of a command's arguments."""
        return cls(**{field.name: given.pop(field.name) for field in fields(cls)})

    def arguments(self) -> dict[str, Any]:
        """Arguments of `FlyLlama`; those that say nothing are left out."""
        out = {"rpc_servers": self.rpc, "devices": self.devices, "tensor_split": self.tensor_split}
        return {name: list(value) for name, value in out.items() if value is not None}

    def place(self, drafter: AnyDrafter | None) -> AnyDrafter | None:
        """The drafter, or drafters, with draft models on `draft_devices`."""
        parts = require_drafters(drafter)
        return as_given([self.place_own(part) if isinstance(part, OwnDrafter) else part for part in parts])

    def place_own(self, drafter: OwnDrafter) -> OwnDrafter:
        """One drafter likewise."""
        if self.draft_devices is None or not isinstance(drafter, DraftModel):
            return drafter
        return replace(drafter, devices=self.draft_devices)

    def as_dict(self) -> dict[str, Any]:
        """What was given, fit for JSON."""
        return {name: list(value) for name, value in asdict(self).items() if value is not None}


class _Names(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Names of devices with commas between them; "none": no name."""

    name = "devices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = () if value == "none" else tuple(name.strip() for name in str(value).split(","))
        if not all(names):
            self.fail(f"{value!r} has an empty name; write CUDA0,192.168.0.7:50052, or none for the CPU.", param, ctx)
        return names


class _Servers(_Names):
    """Addresses of servers with commas between them."""

    name = "servers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        try:
            names = tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else tuple(value)
            for name in names:
                split_address(name)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return names


RPC_OPTION = machine(
    "--rpc", metavar="HOST:PORT,...", type=_Servers(),
    help=f"RPC servers (rpc-server of llama.cpp) that take a part of the model; {NOT_SAFE}.",
)  # fmt: skip

KERNELS_OPTION = machine(
    "--kernels", type=click.Choice(CHOICES),
    help="Kernels on the CPU: auto, ours if they are faster here, or stock, llama.cpp's.  "
    f"[default: {VARIABLE}, or auto]",
)  # fmt: skip

WHERE_OPTIONS: list[Callable[[Any], Any]] = [
    RPC_OPTION,
    machine(
        "--devices", metavar="NAME,...", type=_Names(),
        help="Put the model on these devices alone: names of `doctor`, or HOST:PORT of an RPC server; none: the CPU.  "
        "[default: those of --rpc, and the GPUs]",
    ),
    machine(
        "--tensor-split", metavar="X,...", type=SHARES, help="Shares of the model for the devices, in their order."
    ),
    machine(
        "--draft-devices", metavar="NAME,...", type=_Names(),
        help="The same for the draft model.  [default: this machine's]",
    ),
]  # fmt: skip
