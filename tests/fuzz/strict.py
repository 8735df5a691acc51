"""A second reader of heads, written from the grammar alone: it splits lines and believes nothing.

It shares no code with `meshd.io.http1`, and is slow and plain on purpose: fuzz targets compare the two.
"""

from __future__ import annotations

TOKEN = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
Fields = list[tuple[bytes, bytes]]


def lines_of(raw: bytes) -> list[bytes]:
    """Return the lines of a head without their CRLF; ValueError if any line ends otherwise."""
    if not raw.endswith(b"\r\n\r\n"):
        raise ValueError("no empty line at the end")
    lines = raw[:-4].split(b"\r\n")
    for line in lines:
        if b"\r" in line or b"\n" in line or not line:
            raise ValueError("a line end that is no CRLF, or an empty line")
    return lines


def fields_of(lines: list[bytes]) -> Fields:
    fields: Fields = []
    for line in lines:
        colon = line.find(b":")
        name, value = line[:colon], line[colon + 1 :].strip(b" \t")
        if colon < 1 or not TOKEN.issuperset(name):
            raise ValueError("a bad field name")
        if any(byte == 127 or (byte < 32 and byte != 9) for byte in value):
            raise ValueError("a control byte in a value")
        fields.append((name, value))
    return fields


def values(fields: Fields, name: bytes) -> list[bytes]:
    return [value for key, value in fields if key.lower() == name]


def length_of(fields: Fields) -> int | None:
    """Return the one length that all Content-Length fields agree on; ValueError if they do not."""
    found = {part.strip(b" \t") for value in values(fields, b"content-length") for part in value.split(b",")}
    if not values(fields, b"content-length"):
        return None
    (only,) = found
    if not only or len(only) > 19 or not all(48 <= byte <= 57 for byte in only):
        raise ValueError("not a length")
    return int(only)
