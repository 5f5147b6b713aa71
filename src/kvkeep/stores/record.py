"""A record in storage: a body, and a footer that describes and seals it.

::

    | body ... | magic version length sequence group page | digest | zeros ... |
    0        length                                 length + 80    + 96   whole blocks

The digest is xxh3-128 over the fields and the body. So a record proves by itself which key it has
and that it is whole: a reader needs no index, no ``fsync`` and no write order to trust it. The
digest guards against accidents, not against an attacker who can write to the storage.
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
    """What verifying a body and a footer found."""

    GOOD = enum.auto()  # the wanted record, whole
    EMPTY = enum.auto()  # zeros: never written, or returned to the file system
    OTHER_KEY = enum.auto()  # the record of another key
    OTHER_VERSION = enum.auto()  # written by another version of this code
    CORRUPT = enum.auto()  # torn or damaged


class Footer(NamedTuple):
    """A footer's fields. They are claims until :func:`verify` has checked the body."""

    key: Key
    sequence: int  # grows with every record written to one directory
    length: int  # of the body, in bytes


def footer_bytes(body: int) -> int:
    """Bytes of the footer behind ``body`` bytes of body: both together are whole blocks."""
    return -(-(body + _SEALED.size) // BLOCK) * BLOCK - body


def seal(key: Key, sequence: int, body: memoryview) -> bytes:
    """The footer of ``body``."""
    fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, len(body), sequence, key.group, key.page)
    return (fields + _digest(fields, body)).ljust(footer_bytes(len(body)), b"\0")


def parse(footer: bytes | memoryview) -> Footer | Verdict:
    """Decode a footer without its body.

    Returns:
        A :class:`Footer`, or ``EMPTY``, ``OTHER_VERSION`` or ``CORRUPT`` if it is none.
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
    """Whether footer and body are the whole record of ``key``. Use a body only if ``GOOD``."""
    fields, digest = _SEALED.unpack_from(footer)
    if fields[:_LENGTH] != _BEGIN or fields[_KEY:] != key.group + key.page:
        claims = parse(footer)
        return Verdict.OTHER_KEY if isinstance(claims, Footer) else claims
    return Verdict.GOOD if _digest(fields, body) == digest else Verdict.CORRUPT


def _digest(fields: bytes, body: memoryview) -> bytes:
    state = xxhash.xxh3_128(fields)
    state.update(body)
    return state.digest()
