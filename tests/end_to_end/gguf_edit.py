"""Copies of GGUF files with something changed."""

from __future__ import annotations

import pytest


def copy_gguf(source, destination, tensor=None, field=None):
    """Writes a copy; `tensor(name, array) -> array` and `field(name, value) -> value` may change what is in it."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(str(destination), reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = entry.contents() if field is None else field(name, entry.contents())
        writer.add_key_value(name, value, entry.types[0], entry.types[-1] if len(entry.types) > 1 else None)
    for entry in reader.tensors:
        array = entry.data.copy()
        writer.add_tensor(entry.name, array if tensor is None else tensor(entry.name, array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(destination)
