"""Records prove their key and their integrity."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.schema import BLOCK, FORMAT_VERSION, Key
from kvkeep.stores.record import Footer, Verdict, footer_bytes, parse, seal, verify

KEY = Key(b"g" * 16, b"p" * 32)
BODY = memoryview(random.Random(0).randbytes(2 * BLOCK))
SEALED = 96  # bytes of a footer that are not padding


@given(st.integers(1, 3 * BLOCK))
def test_a_record_is_whole_blocks_and_no_more_than_it_needs(length: int) -> None:
    footer = seal(KEY, 7, memoryview(bytes(length)))
    assert len(footer) == footer_bytes(length)
    assert (length + len(footer)) % BLOCK == 0
    assert SEALED <= len(footer) < SEALED + BLOCK


def test_good() -> None:
    assert verify(seal(KEY, 7, BODY), KEY, BODY) is Verdict.GOOD
    assert parse(seal(KEY, 7, BODY)) == Footer(KEY, 7, len(BODY))


def test_zeros_are_empty() -> None:
    assert verify(bytes(BLOCK), KEY, BODY) is Verdict.EMPTY


@pytest.mark.parametrize("other", [Key(b"G" * 16, KEY.page), Key(KEY.group, b"P" * 32)])
def test_another_key(other: Key) -> None:
    assert verify(seal(other, 7, BODY), KEY, BODY) is Verdict.OTHER_KEY


def test_another_version() -> None:
    footer = bytearray(seal(KEY, 7, BODY))
    footer[8] = FORMAT_VERSION + 1
    assert verify(footer, KEY, BODY) is Verdict.OTHER_VERSION


def test_a_shorter_or_longer_body_is_corrupt() -> None:
    footer = seal(KEY, 7, BODY)
    assert verify(footer, KEY, BODY[:BLOCK]) is Verdict.CORRUPT
    assert verify(footer, KEY, memoryview(bytes(BODY) + bytes(BLOCK))) is Verdict.CORRUPT


def test_a_footer_of_another_sequence_does_not_fit_another_digest() -> None:
    footer = seal(KEY, 7, BODY)[:80] + seal(KEY, 8, BODY)[80:]
    assert verify(footer, KEY, BODY) is Verdict.CORRUPT


@given(st.binary(max_size=SEALED))
def test_garbage_is_never_good(footer: bytes) -> None:
    assert verify(footer.ljust(BLOCK, b"\0"), KEY, BODY) is not Verdict.GOOD


@given(st.integers(0, 8 * (SEALED + len(BODY)) - 1))
def test_no_single_bit_can_flip(bit: int) -> None:
    record = bytearray(seal(KEY, 7, BODY)[:SEALED] + BODY)
    record[bit // 8] ^= 1 << bit % 8
    footer = bytes(record[:SEALED]).ljust(BLOCK, b"\0")
    assert verify(footer, KEY, memoryview(record)[SEALED:]) is not Verdict.GOOD
