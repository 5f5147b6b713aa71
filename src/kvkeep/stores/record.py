"""A record in storage: a body, and a footer that describes and seals it.

::

    | body ... | magic version length sequence group page | digest | zeros ... |
    0        length                                 length + 80    + 96   whole blocks

The digest is xxh3-128 over the fields and the body, so a record proves by itself whose it is and
that it is whole: no index, no ``fsync`` and no write order is needed to trust what was read. It
guards against accidents, not against somebody who can write to the storage.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import xxhash

from ..schema import BLOCK, FORMAT_VERSION, Key

MAGIC = b"kvkeep\r\n"

_FIELDS = struct.Struct("<8sQQQ16s32s")  # magic, version, length, sequence, group, page
_SIZE = _FIELDS.size
_LENGTH, _KEY = 16, 32  # where these begin
_BEGIN = struct.pack("<8sQ", MAGIC, FORMAT_VERSION)
_SEALED = struct.Struct(f"<{_SIZE}s16s")  # all fields, digest


class Verdict(enum.Enum):
    """What a body and a footer turned out to be."""

    GOOD = enum.auto()  # the record that was asked for, whole
    EMPTY = enum.auto()  # zeros: nothing was ever written here, or it was given back
    OTHER_KEY = enum.auto()  # somebody else's record
    OTHER_VERSION = enum.auto()  # written by another version of this code
    CORRUPT = enum.auto()  # torn or damaged


class Footer(NamedTuple):
    """A footer's fields. They are claims until :func:`verify` has seen the body."""

    key: Key
    sequence: int  # grows with every record written to one directory
    length: int  # of the body, in bytes


def footer_bytes(body: int) -> int:
    """Bytes of the footer of so many bytes of body: both together are whole blocks."""
    return -(-(body + _SEALED.size) // BLOCK) * BLOCK - body


def seal(key: Key, sequence: int, body: memoryview) -> bytes:
    """The footer to put behind ``body``."""
    fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, len(body), sequence, key.group, key.page)
    return (fields + _digest(fields, body)).ljust(footer_bytes(len(body)), b"\0")


def parse(footer: bytes | memoryview) -> Footer | Verdict:
    """What a footer claims, without its body; a verdict if it claims nothing.

    Returns:
        A :class:`Footer`, or one of ``EMPTY``, ``OTHER_VERSION`` and ``CORRUPT``.
    """
    magic, version, length, sequence, group, page = _FIELDS.unpack_from(footer)
    if magic == bytes(len(MAGIC)):
        return Verdict.EMPTY
    if magic != MAGIC:
        return Verdict.CORRUPT
    if version != FORMAT_VERSION:
        return Verdict.OTHER_VERSION
    return Footer(Key(group, page), sequence, length)


def verify(footer: bytes | memoryview, key: Key, body: memoryview) -> Verdict:
    """Is this the whole record of ``key``? Only ``GOOD`` lets a body be used."""
    fields, digest = _SEALED.unpack_from(footer)
    if fields[:_LENGTH] != _BEGIN or fields[_KEY:] != key.group + key.page:
        claims = parse(footer)
        return Verdict.OTHER_KEY if isinstance(claims, Footer) else claims
    return Verdict.GOOD if _digest(fields, body) == digest else Verdict.CORRUPT


def _digest(fields: bytes, body: memoryview) -> bytes:
    state = xxhash.xxh3_128(fields)
    state.update(body)
    return state.digest()
