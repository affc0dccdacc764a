"""The header of a GGUF file as it lies in the file, to be written with whatever is wrong in it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

STRING, ARRAY = 8, 9
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letter by type of value; 8 is a string (bytes), 9 an array: (type of its elements, list)."""

INTEGERS = tuple(kind for kind in FORMATS if kind not in (6, 7, 12))


@dataclass
class Field:
    key: bytes
    kind: int
    value: object


@dataclass
class Tensor:
    name: bytes
    shape: list[int]
    kind: int
    offset: int


@dataclass
class Header:
    version: int
    n_tensors: int
    n_fields: int
    fields: list[Field]
    tensors: list[Tensor]
    data: bytes
    """What follows the header, from the first tensor on."""

    def to_bytes(self) -> bytes:
        head = struct.pack("<4sIQQ", b"GGUF", self.version, self.n_tensors % 2**64, self.n_fields % 2**64)
        for field in self.fields:
            head += _string(field.key) + struct.pack("<I", field.kind) + _value(field.kind, field.value)
        for tensor in self.tensors:
            head += _string(tensor.name) + struct.pack("<I", len(tensor.shape))
            head += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape) + struct.pack(
                "<IQ", tensor.kind, tensor.offset
            )
        return head + bytes(-len(head) % 32) + self.data

    def set(self, key: bytes, value: object) -> None:
        """Replaces a field, or adds it: an int as u32, a float as f32, a str, or a list of one of these ([]: str)."""
        kinds = {int: 4, float: 6, str: STRING}
        values = value if isinstance(value, list) else [value]
        kind = kinds[type(values[0])] if values else STRING
        raw = [one.encode() if isinstance(one, str) else one for one in values]
        field = next((f for f in self.fields if f.key == key), None)
        if field is None:
            field = Field(key, kind, None)
            self.fields.append(field)
            self.n_fields += 1
        field.kind, field.value = (ARRAY, (kind, raw)) if isinstance(value, list) else (kind, raw[0])

    def copy(self) -> Header:
        """Fields and tensors can be changed, values in place cannot."""
        fields = [Field(f.key, f.kind, f.value) for f in self.fields]
        tensors = [Tensor(t.name, list(t.shape), t.kind, t.offset) for t in self.tensors]
        return Header(self.version, self.n_tensors, self.n_fields, fields, tensors, self.data)


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _value(kind: int, value: object) -> bytes:
    if kind == STRING:
        return _string(value)
    if kind != ARRAY:
        return struct.pack("<" + FORMATS[kind], value)
    element, values = value
    head = struct.pack("<IQ", element, len(values))
    if element in FORMATS:
        return head + struct.pack(f"<{len(values)}{FORMATS[element]}", *values)
    return head + b"".join(_value(element, one) for one in values)


def read_header(path) -> Header:
    data = path.read_bytes()
    at = 0

    def take(form: str) -> tuple:
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values

    def string() -> bytes:
        nonlocal at
        (n,) = take("Q")
        at += n
        return data[at - n : at]

    def value(kind: int) -> object:
        if kind == STRING:
            return string()
        if kind != ARRAY:
            return take(FORMATS[kind])[0]
        element, n = take("IQ")
        if element in FORMATS:
            return element, list(take(f"{n}{FORMATS[element]}"))
        return element, [value(element) for _ in range(n)]

    _, version, n_tensors, n_fields = take("4sIQQ")
    fields, tensors = [], []
    for _ in range(n_fields):
        key, (kind,) = string(), take("I")
        fields.append(Field(key, kind, value(kind)))
    for _ in range(n_tensors):
        name, (n_dimensions,) = string(), take("I")
        shape, (kind, offset) = list(take(f"{n_dimensions}Q")), take("IQ")
        tensors.append(Tensor(name, shape, kind, offset))
    return Header(version, n_tensors, n_fields, fields, tensors, data[at + -at % 32 :])
