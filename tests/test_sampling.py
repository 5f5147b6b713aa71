"""Sampling: the right distribution, and the same token in any batch."""

from __future__ import annotations

import math
import random

import pytest
import torch

from kvkeep.engine.messages import Sampling
from kvkeep.engine.sampling import Draw, sample, uniform


def naive(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> dict[int, float]:
    """Probabilities after temperature, then top-k, then top-p, then min-p."""
    best = max(logits)
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    weights = {i: math.exp((logits[i] - best) / temperature) for i in order}
    if top_k > 0:
        weights = {i: weights[i] for i in order[:top_k]}
    total, mass, kept = sum(weights.values()), 0.0, {}
    for i, weight in weights.items():
        if mass >= top_p * total:
            break
        kept[i] = weight
        mass += weight
    kept = {i: weight for i, weight in kept.items() if weight >= min_p * weights[order[0]]}
    return {i: weight / sum(kept.values()) for i, weight in kept.items()}


SETTINGS = [
    *((1.0, -1, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, -1, 0.8, 0.0), (2.0, 6, 0.7, 0.0)),
    *((1.0, 1, 1.0, 0.0), (1.0, -1, 1.0, 0.1), (2.0, -1, 0.9, 0.4), (2.0, 7, 1.0, 0.6)),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), SETTINGS)
def test_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(10, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = naive(logits.tolist(), temperature, top_k, top_p, min_p)
    if min_p:
        assert len(expected) < len(naive(logits.tolist(), temperature, top_k, top_p))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    count = 20000
    draws = [Draw(sampling, seed, seed % 7) for seed in range(count)]
    found = sample(logits.expand(count, -1), draws).bincount(minlength=10)
    assert {i for i, n in enumerate(found.tolist()) if n} == set(expected)
    statistic = sum((found[i] - count * p) ** 2 / (count * p) for i, p in expected.items())
    assert statistic < 34  # at most 9 degrees of freedom: exceeded once in 10000


def test_filters_equal_a_naive_reference_on_random_rows() -> None:
    rng = random.Random(0)
    rows, draws, allowed = [], [], []
    for i in range(200):
        logits = [rng.gauss(0, 2) for _ in range(50)]
        options = rng.choice([0.3, 1.0, 3.0]), rng.choice([-1, 1, 7]), rng.choice([0.01, 0.6, 1.0])
        rows.append(logits)
        draws.append(
            Draw(Sampling(temperature=options[0], top_k=options[1], top_p=options[2]), i, i)
        )
        allowed.append(naive(logits, *options))
    for token, draw, chances in zip(
        sample(torch.tensor(rows), draws).tolist(), draws, allowed, strict=True
    ):
        noise, mass = uniform(draw.seed, draw.position), 0.0
        for i in sorted(chances) if len(chances) == 50 else chances:  # all: by id; some: by rank
            mass += chances[i]
            if noise < mass:
                assert token == i
                break


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    warm, cold = Sampling(temperature=1.0), Sampling(temperature=0.0)
    draws = [Draw(warm, 1, 5), Draw(cold, 2, 6), Draw(warm, 3, 7), Draw(cold, 4, 8)]
    together = sample(logits, draws)
    alone = torch.cat([sample(logits[i : i + 1], [draws[i]]) for i in range(4)])
    assert together.tolist() == alone.tolist()
    assert together[1::2].tolist() == logits[1::2].argmax(-1).tolist()
    flat = torch.zeros(1, 1000)
    tokens = {int(sample(flat, [Draw(warm, seed, at)])) for seed in (0, 1, 2) for at in range(20)}
    assert len(tokens) > 50


def test_noise_is_uniform_and_takes_any_seed() -> None:
    values = [uniform(seed, position) for seed in (-1, 2**64 + 3, 0) for position in range(3000)]
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.02
    assert len(set(values)) == len(values)


def test_extreme_logits_and_temperatures() -> None:
    logits = torch.tensor([[0.0, 1e30, -math.inf], [-math.inf, 0.0, -math.inf]])
    draws = [Draw(Sampling(temperature=t), 1, 1) for t in (1e-6, 1e3)]
    assert sample(logits, draws).tolist() == [1, 1]


def test_not_a_number_is_no_error() -> None:
    token = sample(torch.full((1, 5), torch.nan), [Draw(Sampling(temperature=1.0), 1, 1)])
    assert 0 <= int(token) < 5


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 5), []).tolist() == []
