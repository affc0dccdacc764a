"""Where a model is put: devices of this machine and of other ones (docs/rpc.md)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import llama_cpp

from pyfly_cpp.machine import rpc
from pyfly_cpp.machine.devices import GPU, INTEGRATED_GPU, Device, default_gpus, local_devices


def require_names(name: str, texts: Any) -> tuple[str, ...]:
    """A list of names, of servers or devices; raises ValueError for anything else."""
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence) or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"{name} must be a list of texts, not {texts!r}.")
    names: tuple[str, ...] = tuple(texts)
    twice = next((text for i, text in enumerate(names) if text in names[:i]), None)
    if twice is not None:
        raise ValueError(f"{name} names {twice!r} twice; leave one out.")
    return names


class Placement:
    """The devices that a model is put on.

    A device is named as ggml names it ("CUDA0"), or by its server: "host:port" are all devices of a server,
    "host:port/1" is the second one.
    """

    def __init__(self, rpc_servers: Sequence[str] = (), devices: Sequence[str] | None = None) -> None:
        """
        Args:
            rpc_servers: Servers, "host:port".
            devices: Devices by name, in this order; none: the CPU alone. None: all of the servers, then this machine's
                GPUs; without servers what llama.cpp chooses.

        Raises:
            ValueError: a name is malformed or unknown, or llama.cpp was built without RPC.
            RpcError: a server cannot be reached, or of another version.
        """
        names = require_names("rpc_servers", rpc_servers)
        chosen = None if devices is None else require_names("devices", devices)
        on_servers = [name for name in chosen or () if ":" in name]
        self._servers = {name: rpc.connect(name) for name in (*names, *(name.partition("/")[0] for name in on_servers))}
        self._devices: list[Device] | None = None
        if chosen is not None:
            self._devices = [device for name in chosen for device in self._named(name)]
        elif self._servers:
            self._devices = [device for name in names for device in self._servers[name]] + default_gpus()
        self._require_few()

    @property
    def addresses(self) -> list[int] | None:
        """Addresses of the ggml_backend_devs; None: llama.cpp chooses."""
        return None if self._devices is None else [device.address for device in self._devices]

    @property
    def has_servers(self) -> bool:
        """Whether other machines take part."""
        return bool(self._servers)

    def place(self, params: Any) -> None:
        """Sets the devices of a llama_model_params, which borrows them from this object."""
        if self._devices is not None:
            self._array = (ctypes.c_void_p * (len(self._devices) + 1))(*(device.address for device in self._devices))
            params.devices = ctypes.cast(self._array, ctypes.c_void_p)

    def require_fitting(self, tensor_split: Any, split_mode: int | None) -> None:
        """Raises ValueError unless a model can be split like this."""
        if tensor_split is not None:
            _require_shares(tensor_split, None if self._devices is None else len(self._devices))
        if self._servers and split_mode == llama_cpp.LLAMA_SPLIT_MODE_TENSOR:
            raise ValueError("RPC servers take whole layers; leave out split_mode, or rpc_servers and their devices.")

    def describe(self) -> list[list[object]]:
        """The devices as costs depend on them, ready for JSON; empty if llama.cpp chooses."""
        return [[device.backend, device.name, device.memory_total] for device in self._devices or ()] or (
            [] if self._devices is None else [["CPU"]]
        )

    # ---- Names -------------------------------------------------------------------------------------------------------

    def _named(self, name: str) -> list[Device]:
        if ":" in name:
            server, _, number = name.partition("/")
            found = self._servers[server]
            if "/" not in name:
                return found
            if number.isascii() and number.isdigit() and int(number[:9]) < len(found):
                return [found[int(number[:9])]]
            raise ValueError(f"there is no device {name!r}; that server's are {', '.join(d.name for d in found)}.")
        here = [device for device in local_devices() if device.kind in (GPU, INTEGRATED_GPU)]
        found = [device for device in here if device.name == name]
        if not found:
            known = f"this machine's are {', '.join(d.name for d in here)}" if here else "this machine has only the CPU"
            raise ValueError(f"there is no device {name!r}; {known}, and those of an RPC server are written HOST:PORT.")
        return found

    def _require_few(self) -> None:
        n, most = len(self._devices or ()), llama_cpp.LLAMA_MAX_DEVICES
        if n > most:
            raise ValueError(f"a model can be on {most} devices at most, not {n}; name some of them with devices=.")


def _require_shares(shares: Any, n_devices: int | None) -> None:
    try:
        numbers = [float(share) for share in shares]
    except (TypeError, ValueError):
        raise ValueError(f"tensor_split must be a list of numbers, one for each device, not {shares!r}.") from None
    if not all(math.isfinite(number) and number >= 0.0 for number in numbers):
        raise ValueError(f"tensor_split must hold shares >= 0, such as [3, 1], not {shares!r}.")
    if n_devices is not None and len(numbers) != n_devices:
        raise ValueError(f"tensor_split has {len(numbers)} shares for {n_devices} devices; give one for each.")
