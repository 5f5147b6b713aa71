"""What the tests of the serving benchmarks share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from kvkeep.bench.serving import running


@pytest.fixture(autouse=True)
def _known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for the real one imports PyTorch."""
    monkeypatch.setattr(running, "machine", lambda: {"cpu": "<known>", "commit": "abc"})


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A directory with a tokenizer that splits at spaces, and starts each prompt with ``<s>``."""
    words = ["one", "two", "three", "four", "ab", "c"]
    vocab = {"<s>": 0, "<unk>": 1} | {word: 2 + at for at, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path
