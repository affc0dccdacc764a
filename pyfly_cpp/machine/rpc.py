"""RPC servers (rpc-server of llama.cpp): whether one can be used, and its devices (docs/rpc.md)."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

import llama_cpp

from pyfly_cpp.errors import RpcError
from pyfly_cpp.machine.devices import Device, rpc_addresses
from pyfly_cpp.machine.releases import RPC_PROTOCOLS

_SECONDS = 5.0
"""Longest wait for an answer of a server."""

_DEVICE_MEMORY, _HELLO, _DEVICE_COUNT = 11, 14, 15
"""Commands of the protocol. A request is the command, the size of its content (8 bytes) and the content. An answer is
the size of its content (8 bytes) and the content. Numbers are little-endian."""

_N_CAPABILITIES = 24
"""Bytes that announce what a side can do besides TCP."""

_connected: dict[str, list[Device]] = {}
"""Devices of the servers that llama.cpp in this process is connected to, by address."""


def split_address(text: str) -> tuple[str, int]:
    """Host and port of an RPC server, from "host:port" (llama.cpp knows no IPv6); raises ValueError."""
    host, _, port = text.rpartition(":")
    is_host = host and host.isprintable() and not any(char.isspace() or char in ":/,@" for char in host)
    if not is_host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 2**16:
        raise ValueError(f"an RPC server is written HOST:PORT, such as 192.168.0.7:50052, not {text!r}.")
    return host, int(port)


def devices_of(name: str) -> list[Device]:
    """The devices of an RPC server, with any build of llama.cpp; their address is 0. Waits five seconds for an answer.

    Raises:
        ValueError: the address is malformed.
        RpcError: the server cannot be reached, is no such server, is of another version, or serves another program.
    """
    with _connection(name) as connection, connection.makefile("rwb") as stream:
        try:
            version = _answer(stream, _HELLO, bytes(_N_CAPABILITIES))[:3]
            protocol = RPC_PROTOCOLS.get(llama_cpp.__version__, max(RPC_PROTOCOLS.values()))
            if version[0] != protocol[0] or version[1] > protocol[1]:
                theirs, ours = (".".join(map(str, numbers)) for numbers in (version, protocol))
                raise RpcError(
                    f"the RPC server {name} speaks version {theirs} of llama.cpp's RPC protocol, and this "
                    f"llama-cpp-python version {ours}; build both from the same llama.cpp."
                )
            (n,) = struct.unpack("<I", _answer(stream, _DEVICE_COUNT))
            if n == 0:
                raise ConnectionError
            memory = [struct.unpack("<QQ", _answer(stream, _DEVICE_MEMORY, struct.pack("<I", i))) for i in range(n)]
        except socket.timeout:
            raise RpcError(
                f"the RPC server {name} takes the connection and does not answer; rpc-server serves one program at a "
                "time, so end the other one or start another rpc-server."
            ) from None
        except (OSError, struct.error, IndexError):
            raise RpcError(
                f"the program at {name} does not answer like an rpc-server of llama.cpp; check its address and port, "
                "and build it from the same release of llama.cpp."
            ) from None
    return [
        Device("RPC", name if n == 1 else f"{name}/{i}", "device of an RPC server", "remote", free, total, 0)
        for i, (free, total) in enumerate(memory)
    ]


def connect(name: str) -> list[Device]:
    """The devices of an RPC server, for llama.cpp to put a model on.

    Raises:
        ValueError: the address is malformed, or llama.cpp was built without RPC.
        RpcError: as `devices_of`.
    """
    split_address(name)
    if not llama_cpp.llama_supports_rpc():
        raise ValueError(
            f'this llama-cpp-python was built without RPC; to use {name} build it with CMAKE_ARGS="-DGGML_RPC=on".'
        )
    if name in _connected:  # it may be busy with a model of this process
        _connection(name).close()
    else:
        _connected[name] = [d._replace(address=a) for d, a in zip(devices_of(name), rpc_addresses(name))]
    return _connected[name]


def _connection(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_INET)
    connection.settimeout(_SECONDS)
    # Closes with a reset: a server that answers a client who has gone is ended by a signal.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("hh" if os.name == "nt" else "ii", 1, 0))
    try:
        connection.connect(split_address(name))
    except OSError as error:
        connection.close()
        raise RpcError(
            f"the RPC server {name} cannot be reached ({error.strerror or error}); start rpc-server on that machine, "
            "and check its address and port."
        ) from None
    return connection


def _answer(stream: Any, command: int, request: bytes = b"") -> bytes:
    """The content of the server's answer to a command. Raises OSError or struct.error."""
    stream.write(struct.pack("<BQ", command, len(request)) + request)
    stream.flush()
    (n,) = struct.unpack("<Q", stream.read(8))
    answer: bytes = stream.read(min(n, 64))  # none is as long
    if len(answer) < n:
        raise ConnectionError
    return answer
