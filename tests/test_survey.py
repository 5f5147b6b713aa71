"""What a model is found to keep, and what is refused because no page could hold it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvkeep.models.target.survey import Inventory, Kept, Survey, states
from kvkeep.schema import UnsupportedModel


def rows(heads: int, dim: int) -> torch.Tensor:
    return torch.zeros(1, heads, 2, dim)


def attend(survey: Survey, layer: int, window: int | None = None) -> None:
    out = survey.attend(layer, rows(4, 8), rows(2, 8), rows(2, 6), {"sliding_window": window})
    assert out.shape == (1, 2, 4, 6)  # so that the layer can go on


@pytest.mark.parametrize(
    ("window", "page_tokens", "tail"), [(1, 4, 1), (4, 4, 1), (5, 4, 1), (6, 4, 2), (9, 1, 8)]
)
def test_a_window_reaches_over_so_many_pages(window: int, page_tokens: int, tail: int) -> None:
    survey = Survey()
    attend(survey, 0, window)
    (group,) = Inventory(survey.rows(), survey.window()).groups(page_tokens, "BF16")
    assert (group.name, group.tail, group.working, group.sharded) == ("window", tail, 0, True)
    assert [(c.name, c.layers, c.shape, c.dtype) for c in group.components] == [
        ("k", (0,), (page_tokens, 2, 8), "BF16"),
        ("v", (0,), (page_tokens, 2, 6), "BF16"),
    ]


def test_windows_of_several_sizes() -> None:
    survey = Survey()
    for layer, window in enumerate((8, None, 16)):
        attend(survey, layer, window)
    with pytest.raises(UnsupportedModel, match=r"several sizes: \[8, 16\]"):
        survey.window()


def test_a_cache_that_is_not_read_by_our_attention() -> None:
    survey = Survey()
    attend(survey, 0)
    for layer in (0, 1):
        survey.update(layer, rows(2, 8), rows(2, 6))
    with pytest.raises(UnsupportedModel, match=r"layers \[1\] do not reach"):
        survey.rows()
    survey = Survey()
    attend(survey, 3)
    survey.update(3, rows(2, 5), rows(2, 6))  # neither what is attended to nor one latent
    with pytest.raises(UnsupportedModel, match="layer 3 caches"):
        survey.rows()


def test_states_that_fit_no_component() -> None:
    layer = SimpleNamespace(conv_states={0: torch.zeros(1, 3), 1: torch.zeros(1, 3)})
    with pytest.raises(UnsupportedModel, match="layer 1 keeps 2 conv states"):
        states([SimpleNamespace(), layer])
    kept = [Kept("full", "k", layer, (2, dim)) for layer, dim in ((0, 8), (1, 16))]
    with pytest.raises(UnsupportedModel, match="'k' in several forms"):
        Inventory(kept, None).groups(4, "F32")
    kept = [Kept("full", "latent", 0, (8,)), Kept("state", "conv", 1, (8, 3), "F32")]
    with pytest.raises(UnsupportedModel, match="beside recurrent layers"):
        Inventory(kept, None)
