"""A record in storage: a header that describes and seals a body.

::

    | magic version length sequence group page | digest | zeros ... | body ...            |
    0                                         80       96        4096            4096 + length

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

HEADER = BLOCK
"""Bytes of a header: a block of its own, so that bodies stay aligned."""

MAGIC = b"kvkeep\r\n"

_FIELDS = struct.Struct("<8sQQQ16s32s")  # magic, version, length, sequence, group, page
_SIZE = _FIELDS.size
_LENGTH, _KEY = 16, 32  # where these begin
_BEGIN = struct.pack("<8sQ", MAGIC, FORMAT_VERSION)
_DIGEST = slice(_SIZE, _SIZE + 16)


class Verdict(enum.Enum):
    """What a header and a body turned out to be."""

    GOOD = enum.auto()  # the record that was asked for, whole
    EMPTY = enum.auto()  # zeros: nothing was ever written here, or it was given back
    OTHER_KEY = enum.auto()  # somebody else's record
    OTHER_VERSION = enum.auto()  # written by another version of this code
    CORRUPT = enum.auto()  # torn or damaged


class Header(NamedTuple):
    """A header's fields. They are claims until :func:`verify` has seen the body."""

    key: Key
    sequence: int  # grows with every record written to one directory
    length: int  # of the body, in bytes


def seal(key: Key, sequence: int, body: memoryview) -> bytes:
    """The ``HEADER`` bytes to put before ``body``."""
    fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, len(body), sequence, key.group, key.page)
    return (fields + _digest(fields, body)).ljust(HEADER, b"\0")


def parse(header: bytes | memoryview) -> Header | Verdict:
    """What a header of ``HEADER`` bytes claims, without its body; a verdict if it claims nothing.

    Returns:
        A :class:`Header`, or one of ``EMPTY``, ``OTHER_VERSION`` and ``CORRUPT``.
    """
    magic, version, length, sequence, group, page = _FIELDS.unpack_from(header)
    if magic == bytes(len(MAGIC)):
        return Verdict.EMPTY
    if magic != MAGIC:
        return Verdict.CORRUPT
    if version != FORMAT_VERSION:
        return Verdict.OTHER_VERSION
    return Header(Key(group, page), sequence, length)


def verify(header: bytes | memoryview, key: Key, body: memoryview) -> Verdict:
    """Is this the whole record of ``key``? Only ``GOOD`` lets a body be used."""
    begin = bytes(header[: _DIGEST.stop])
    if begin[:_LENGTH] != _BEGIN or begin[_KEY:_SIZE] != key.group + key.page:
        claims = parse(header)
        return Verdict.OTHER_KEY if isinstance(claims, Header) else claims
    sealed = _digest(begin[:_SIZE], body) == begin[_DIGEST]
    return Verdict.GOOD if sealed else Verdict.CORRUPT


def _digest(fields: bytes, body: memoryview) -> bytes:
    state = xxhash.xxh3_128(fields)
    state.update(body)
    return state.digest()
