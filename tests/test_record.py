"""Records prove whose they are and that they are whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.schema import BLOCK, FORMAT_VERSION, Key
from kvkeep.stores.record import HEADER, Header, Verdict, parse, seal, verify

KEY = Key(b"g" * 16, b"p" * 32)
BODY = memoryview(random.Random(0).randbytes(2 * BLOCK))
SEALED = 96  # bytes of a header that are not padding


def test_a_header_is_one_block() -> None:
    assert len(seal(KEY, 7, BODY)) == HEADER == BLOCK


def test_good() -> None:
    assert verify(seal(KEY, 7, BODY), KEY, BODY) is Verdict.GOOD
    assert parse(seal(KEY, 7, BODY)) == Header(KEY, 7, len(BODY))


def test_zeros_are_empty() -> None:
    assert verify(bytes(HEADER), KEY, BODY) is Verdict.EMPTY


@pytest.mark.parametrize("other", [Key(b"G" * 16, KEY.page), Key(KEY.group, b"P" * 32)])
def test_another_key(other: Key) -> None:
    assert verify(seal(other, 7, BODY), KEY, BODY) is Verdict.OTHER_KEY


def test_another_version() -> None:
    header = bytearray(seal(KEY, 7, BODY))
    header[8] = FORMAT_VERSION + 1
    assert verify(header, KEY, BODY) is Verdict.OTHER_VERSION


def test_a_shorter_or_longer_body_is_corrupt() -> None:
    header = seal(KEY, 7, BODY)
    assert verify(header, KEY, BODY[:BLOCK]) is Verdict.CORRUPT
    assert verify(header, KEY, memoryview(bytes(BODY) + bytes(BLOCK))) is Verdict.CORRUPT


def test_a_header_of_another_sequence_does_not_fit_another_digest() -> None:
    header = seal(KEY, 7, BODY)[:80] + seal(KEY, 8, BODY)[80:]
    assert verify(header, KEY, BODY) is Verdict.CORRUPT


@given(st.binary(max_size=SEALED))
def test_garbage_is_never_good(header: bytes) -> None:
    assert verify(header.ljust(HEADER, b"\0"), KEY, BODY) is not Verdict.GOOD


@given(st.integers(0, 8 * (SEALED + len(BODY)) - 1))
def test_no_single_bit_can_flip(bit: int) -> None:
    record = bytearray(seal(KEY, 7, BODY)[:SEALED] + BODY)
    record[bit // 8] ^= 1 << bit % 8
    header = bytes(record[:SEALED]).ljust(HEADER, b"\0")
    assert verify(header, KEY, memoryview(record)[SEALED:]) is not Verdict.GOOD
