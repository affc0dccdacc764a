"""The devices that llama.cpp computes on."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

_KINDS = ("CPU", "GPU", "integrated GPU", "accelerator", "meta")
"""ggml_backend_dev_type of ggml-backend.h."""


GPU, INTEGRATED_GPU = _KINDS[1:3]


class Device(NamedTuple):
    """A device of one of ggml's backends."""

    backend: str
    name: str
    description: str
    kind: str
    memory_free: int
    """Sizes in bytes."""
    memory_total: int
    address: int
    """Address of the ggml_backend_dev, valid as long as the process."""

    def as_dict(self) -> dict[str, Any]:
        """The device without its address, ready for JSON."""
        return {name: value for name, value in self._asdict().items() if name != "address"}


class _Properties(ctypes.Structure):
    """ggml_backend_dev_props."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("capabilities", ctypes.c_bool * 16),  # more than there are
    )


def devices() -> list[dict[str, Any]]:
    """This machine's devices, ready for JSON; empty if ggml's libraries cannot be asked."""
    return [device.as_dict() for device in local_devices()]


def local_devices() -> list[Device]:
    """This machine's devices; none if ggml's libraries cannot be asked."""
    try:
        ggml, base = _libraries()
    except (OSError, ImportError, AttributeError):
        return []
    found = []
    for i in range(ggml.ggml_backend_dev_count()):
        address = ggml.ggml_backend_dev_get(i)
        device = ctypes.c_void_p(address)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        kind = base.ggml_backend_dev_type(device)
        registry = ctypes.c_void_p(base.ggml_backend_dev_backend_reg(device))
        found.append(
            Device(
                backend=base.ggml_backend_reg_name(registry).decode("utf-8", errors="replace"),
                name=base.ggml_backend_dev_name(device).decode("utf-8", errors="replace"),
                description=base.ggml_backend_dev_description(device).decode("utf-8", errors="replace"),
                kind=_KINDS[kind] if 0 <= kind < len(_KINDS) else str(kind),
                memory_free=free.value,
                memory_total=total.value,
                address=address,
            )
        )
    return found


def rpc_addresses(server: str) -> list[int]:
    """Addresses of the ggml_backend_devs of an RPC server, "host:port", which ggml connects to."""
    ggml, base = _libraries()
    registry = ctypes.c_void_p(ggml.ggml_backend_reg_by_name(b"RPC"))
    function = base.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_rpc_add_server")
    add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(function)
    servers = ctypes.c_void_p(add(server.encode("utf-8")))
    n = base.ggml_backend_reg_dev_count(servers)
    return [base.ggml_backend_reg_dev_get(servers, ctypes.c_size_t(i)) for i in range(n)]


def default_gpus() -> list[Device]:
    """The devices that llama.cpp puts a model on by default: all GPUs, each once though several backends
    may know it; without one the integrated ones, of one backend."""
    gpus: dict[object, Device] = {}
    integrated: list[Device] = []
    for device in local_devices():
        if device.kind == GPU:
            gpus.setdefault(_hardware(device), device)
        elif device.kind == INTEGRATED_GPU and device.backend == (integrated or [device])[0].backend:
            integrated.append(device)
    return list(gpus.values()) or integrated


def _hardware(device: Device) -> object:
    """An identity of the hardware of a device, as far as its backend gives one."""
    properties = _Properties()
    _libraries()[1].ggml_backend_dev_get_props(ctypes.c_void_p(device.address), ctypes.byref(properties))
    return properties.device_id or device.address


def _libraries() -> tuple[Any, Any]:
    """ggml and ggml-base, as llama_cpp loaded them."""
    from llama_cpp import _ggml
    from llama_cpp._ctypes_extensions import load_shared_library

    ggml = _ggml.libggml
    base = load_shared_library("ggml-base", _ggml.libggml_base_path)
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    size = ctypes.POINTER(ctypes.c_size_t)
    base.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, size, size]
    base.ggml_backend_dev_memory.restype = None
    base.ggml_backend_dev_get_props.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Properties)]
    base.ggml_backend_dev_get_props.restype = None
    ggml.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    base.ggml_backend_reg_dev_count.restype = ctypes.c_size_t
    for name in ("ggml_backend_dev_backend_reg", "ggml_backend_reg_dev_get", "ggml_backend_reg_get_proc_address"):
        getattr(base, name).restype = ctypes.c_void_p
    for name in ("ggml_backend_dev_name", "ggml_backend_dev_description", "ggml_backend_reg_name"):
        getattr(base, name).restype = ctypes.c_char_p
    return ggml, base
