"""Presence: the hit rule compared with its definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schemas import group

from kvkeep.core.presence import HitRule, Presence


@st.composite
def presence(draw):
    """Random groups and which of up to six pages each has."""
    count = draw(st.integers(0, 6))
    tails = draw(st.lists(st.sampled_from([None, 1, 2, 3]), min_size=1, max_size=4))
    groups = tuple(group(f"g{i}", tail, draw(st.booleans())) for i, tail in enumerate(tails))
    has = st.lists(st.booleans(), min_size=count, max_size=count)
    return groups, np.array([draw(has) for _ in groups], dtype=bool), draw(st.booleans())


@pytest.mark.untraced
@settings(max_examples=500)
@given(presence())
def test_the_hit_rule(case) -> None:
    """The largest ``n`` such that every group that counts has all of ``needed(n)``; 0 if none
    counts."""
    groups, mask, strict = case
    rules = [(g, has) for g, has in zip(groups, mask, strict=True) if strict or g.required]
    pages = mask.shape[1] if rules else 0
    fits = [n for n in range(pages + 1) if all(has[i] for g, has in rules for i in g.needed(n))]
    assert Presence(HitRule(groups, strict), mask).usable() == max(fits)


@pytest.mark.untraced
@settings(max_examples=500)
@given(presence())
def test_what_limits_a_hit(case) -> None:
    """The first group that lacks a page that a hit of one page more would need."""
    groups, mask, strict = case
    present = Presence(HitRule(groups, strict), mask)
    for pages in range(mask.shape[1] + 1):
        lacking = [
            g.name
            for g, has in zip(groups, mask, strict=True)
            if (strict or g.required)
            and pages < len(has)
            and not all(has[i] for i in g.needed(pages + 1))
        ]
        assert present.limit(pages) == (lacking[0] if lacking else None)


@pytest.mark.untraced
@settings(max_examples=200)
@given(presence())
def test_the_beginning_of_a_run_is_judged_alone(case) -> None:
    groups, mask, strict = case
    rule = HitRule(groups, strict)
    for pages in range(mask.shape[1] + 1):
        first = Presence(rule, mask).first(pages)
        assert first.usable() == Presence(rule, mask[:, :pages].copy()).usable() <= pages


def test_what_a_hit_needs_is_a_row_per_group() -> None:
    rule = HitRule((group("full"), group("window", 2)), strict=True)
    assert rule.needed(3).tolist() == [[True] * 3, [False, True, True]]
    assert rule.needed(1).tolist() == [[True]] * 2
    assert rule.needed(0).shape == (2, 0)
