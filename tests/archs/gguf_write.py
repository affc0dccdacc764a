"""What all that writes GGUF files shares."""

from __future__ import annotations


def copy_field(writer, name, field):
    """Adds a field of a `GGUFReader`."""
    kind = field.types[-1] if len(field.types) > 1 else None
    writer.add_key_value(name, field.contents(), field.types[0], kind)


def write(writer, arrays):
    """Writes the file of a `GGUFWriter` that has its fields, with these arrays by name, and closes it."""
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
