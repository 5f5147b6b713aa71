"""Fixtures that all engine tests share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from rig import Pair, save_tokenizer
from tiny_models import KINDS, save_draft, save_target


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny random Llama and a random draft for it."""
    root: Path = tmp_path_factory.mktemp("tiny")
    pair = Pair(save_target(root / "target", "Llama"), save_draft(root / "draft"))
    save_tokenizer(pair.target)
    return pair


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Makes models of one of ``KINDS``, each once."""

    @cache
    def make(kind: str) -> Pair:
        root = tmp_path_factory.mktemp(kind)
        family, options = KINDS[kind]
        pair = Pair(save_target(root / "target", family, **options), save_draft(root / "draft"))
        save_tokenizer(pair.target)
        return pair

    return make
