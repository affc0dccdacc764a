"""Where a model is put: devices of this machine and of other ones (docs/rpc.md)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import llama_cpp

from pyfly_cpp import _native
from pyfly_cpp.devices import GPU, INTEGRATED_GPU, Device, default_gpus, local_devices


def require_names(name: str, texts: Any) -> tuple[str, ...]:
    """A list of names, of servers or devices; raises ValueError for anything else."""
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence) or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"{name} must be a list of texts, not {texts!r}.")
    names: tuple[str, ...] = tuple(texts)
    twice = next((text for i, text in enumerate(names) if text in names[:i]), None)
    if twice is not None:
        raise ValueError(f"{name} names {twice!r} twice; leave one out.")
    return names


def split_address(text: str) -> tuple[str, int]:
    """Host and port of an RPC server, from "host:port" ("[host]:port" for IPv6); raises ValueError."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    is_host = host and host.isprintable() and not any(char.isspace() or char in "/,@" for char in host)
    if not is_host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 2**16:
        raise ValueError(f"an RPC server is written HOST:PORT, such as 192.168.0.7:50052, not {text!r}.")
    return host, int(port)


class Placement:
    """The devices that a model is put on. Keeps the RPC servers connected until it is closed; a context manager.

    A device is named as ggml names it ("CUDA0"), or by its server: "host:port" are all devices of a server,
    "host:port/1" is the second one.
    """

    def __init__(self, rpc_servers: Sequence[str] = (), devices: Sequence[str] | None = None) -> None:
        """
        Args:
            rpc_servers: Servers to connect to.
            devices: Devices by name, in this order; none: the CPU alone. None: all of the servers, then this machine's
                GPUs; without servers what llama.cpp chooses.

        Raises:
            ValueError: a name is malformed or unknown, or llama.cpp was built without RPC.
            RpcError: a server is not there, or of another version.
        """
        names = require_names("rpc_servers", rpc_servers)
        chosen = None if devices is None else require_names("devices", devices)
        addresses = {name: split_address(name) for name in names}
        for name in chosen or ():
            if ":" in name:
                server = name.partition("/")[0]
                addresses[server] = split_address(server)
        self._servers: dict[str, _native.RpcServer] = {}
        self._devices: list[Device] | None = None
        try:
            for name, (host, port) in addresses.items():
                self._servers[name] = _native.RpcServer(host, port, name)
            if chosen is not None:
                self._devices = [device for name in chosen for device in self._named(name)]
            elif self._servers:
                self._devices = [device for name in names for device in self._of_server(name)] + default_gpus()
            self._require_few()
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> list[int] | None:
        """Of the ggml_backend_devs; None: llama.cpp chooses."""
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

    def require_alive(self) -> None:
        """Raises RpcError if a server that the model is on was lost: what was computed with it, or read from it, since
        then is void."""
        addresses = self.addresses or []
        for server in self._servers.values():
            if any(device.address in addresses for device in server.devices):
                server.require_alive()

    def describe(self) -> list[list[object]]:
        """What costs hang on, fit for JSON; empty where llama.cpp chooses."""
        return [[device.backend, device.name, device.memory_total] for device in self._devices or ()] or (
            [] if self._devices is None else [["CPU"]]
        )

    def close(self) -> None:
        """Lets go of the servers; models that are on them keep the connection."""
        for server in self._servers.values():
            server.close()
        self._servers = {}

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- Names -------------------------------------------------------------------------------------------------------

    def _of_server(self, name: str) -> list[Device]:
        return remote_devices(name, self._servers[name])

    def _named(self, name: str) -> list[Device]:
        if ":" in name:
            server, _, number = name.partition("/")
            found = self._of_server(server)
            if "/" not in name:
                return found
            if number.isascii() and number.isdigit() and int(number[:9]) < len(found):
                return [found[int(number[:9])]]
            raise ValueError(f"there is no device {name!r}; that server's are {', '.join(d.name for d in found)}.")
        here = [device for device in local_devices() if device.kind in (GPU, INTEGRATED_GPU)]
        found = [device for device in here if device.name == name]
        if not found:
            known = (
                f"this machine's are {', '.join(d.name for d in here)}" if here else "this machine has the CPU alone"
            )
            raise ValueError(f"there is no device {name!r}; {known}, and those of an RPC server are written HOST:PORT.")
        return found

    def _require_few(self) -> None:
        n, most = len(self._devices or ()), llama_cpp.LLAMA_MAX_DEVICES
        if n > most:
            raise ValueError(f"a model can be on {most} devices at most, not {n}; name some of them with devices=.")


def remote_devices(name: str, server: _native.RpcServer) -> list[Device]:
    """The devices of the RPC server of this name."""
    found = server.devices
    names = [name] if len(found) == 1 else [f"{name}/{i}" for i in range(len(found))]
    return [
        Device("RPC", one, "device of an RPC server", "remote", device.memory_free, device.memory_total, device.address)
        for one, device in zip(names, found)
    ]


def _require_shares(shares: Any, n_devices: int | None) -> None:
    try:
        numbers = [float(share) for share in shares]
    except (TypeError, ValueError):
        raise ValueError(f"tensor_split must be a list of numbers, one for each device, not {shares!r}.") from None
    if not all(math.isfinite(number) and number >= 0.0 for number in numbers):
        raise ValueError(f"tensor_split must hold shares >= 0, such as [3, 1], not {shares!r}.")
    if n_devices is not None and len(numbers) != n_devices:
        raise ValueError(f"tensor_split has {len(numbers)} shares for {n_devices} devices; give one for each.")
