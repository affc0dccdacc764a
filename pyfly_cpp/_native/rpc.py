"""Connections to rpc-servers of llama.cpp."""

from __future__ import annotations

from typing import NamedTuple

from pyfly_cpp._native.boundary import Handle, check
from pyfly_cpp._native.library import ffi, lib


class RpcDevice(NamedTuple):
    """`pyfly_rpc_device` of pyfly.h; memory in bytes."""

    memory_free: int
    memory_total: int
    address: int
    """Of the ggml_backend_dev; 0 unless the devices were wanted."""


class RpcServer(Handle):
    """A connection to an rpc-server; all of one server are one. Connecting takes a few seconds at most.

    Args:
        host, port: Where it is.
        name: For errors.
        wants_devices: Whether llama.cpp is to use its devices.

    Raises:
        RpcError: there is no such server, or it cannot be used.
        ValueError: llama.cpp is to use it and was built without RPC.
    """

    def __init__(self, host: str, port: int, name: str, wants_devices: bool = True) -> None:
        texts = [text.encode("utf-8") for text in (host, str(port), name)]
        super().__init__(
            lib.pyfly_rpc_server_new, lib.pyfly_rpc_server_free, "pyfly_rpc_server", *texts, int(wants_devices)
        )

    @property
    def devices(self) -> list[RpcDevice]:
        """Its devices."""
        n = lib.pyfly_rpc_server_devices(self.pointer, ffi.NULL, 0)
        out = ffi.new("pyfly_rpc_device[]", n)
        lib.pyfly_rpc_server_devices(self.pointer, out, n)
        return [RpcDevice(one.memory_free, one.memory_total, int(ffi.cast("uintptr_t", one.device))) for one in out]

    def require_alive(self) -> None:
        """Raises RpcError if it was lost: what was computed with it, or read from it, since then is void."""
        check(lib.pyfly_rpc_server_require_alive, self.pointer)
