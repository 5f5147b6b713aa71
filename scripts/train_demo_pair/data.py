"""Training rows and measuring prompts, many of which repeat themselves.

The text is the source of Python's standard library (PSF licence), read from the interpreter
that runs the training. All other rows are synthetic: blocks of text or of distinct random tokens,
repeated with or without other tokens in between, because the demo shows copying.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
BOS, EOS = "<s>", "</s>"
BOS_ID = 0
FIRST_ORDINARY_ID = 2  # the two special tokens come first
PROMPT_TOKENS = 1024

_SKIPPED_DIRECTORIES = {
    "test", "tests", "site-packages", "idlelib", "encodings", "pydoc_data", "lib2to3",
}  # fmt: skip
_HELD_OUT_SHARE = 0.04
_SHORTEST_PERIOD = 8

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Corpus:
    """The standard library's sources, split by file and encoded with `tokenizer`."""

    tokenizer: Tokenizer
    train: Tokens  # each file begins with BOS
    held_out: Tokens  # used to train neither the models nor the tokenizer


def build_corpus(seed: int = 0) -> Corpus:
    """Read the standard library, train a byte-level BPE on it and encode both splits."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not _SKIPPED_DIRECTORIES.intersection(path.relative_to(root).parts)
    ]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    order = np.random.default_rng(seed).permutation(len(texts))
    held_out_files = int(len(texts) * _HELD_OUT_SHARE)
    held_out = [texts[i] for i in order[:held_out_files]]
    train = [texts[i] for i in order[held_out_files:]]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(train, trainer)
    return Corpus(tokenizer, _encode(tokenizer, train), _encode(tokenizer, held_out))


def _encode(tokenizer: Tokenizer, texts: list[str]) -> Tokens:
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.concatenate([np.array([BOS_ID, *one.ids], dtype=np.int64) for one in encoded])


def distinct_tokens(rng: np.random.Generator, count: int) -> Tokens:
    """Return `count` distinct ordinary (not special) tokens in random order."""
    ordinary = VOCAB_SIZE - FIRST_ORDINARY_ID
    return rng.permutation(ordinary)[:count] + FIRST_ORDINARY_ID


def tiled_prompt(index: int, period: int) -> list[int]:
    """Return measuring prompt number `index`: a block of `period` distinct tokens, repeated.

    The seed is `(period, index)`, so prompts do not depend on each other. With `period` equal to
    PROMPT_TOKENS nothing repeats: such prompts serve as decoys.
    """
    block = distinct_tokens(np.random.default_rng((period, index)), period)
    return np.resize(block, PROMPT_TOKENS).tolist()


@dataclass(frozen=True, slots=True)
class Mixture:
    """Shares of the three kinds of training rows, and how blocks repeat in two of them.

    Rows that repeat a block of distinct random tokens take the remaining share.
    """

    text: float  # share of plain text rows
    repeated_text: float  # share of rows that repeat a block of text
    gaps: float  # share of the repeating rows that have other tokens between the copies
    copies: int  # minimum number of copies in a row without gaps


class Sampler:
    """Draws training rows from a corpus, reproducibly for a seed."""

    def __init__(self, corpus: Corpus, mixture: Mixture, seed: int) -> None:
        """Draw from `corpus.train` in the shares of `mixture`."""
        self._text = corpus.train
        self._mixture = mixture
        self._rng = np.random.default_rng(seed)

    def batch(self, rows: int, length: int) -> torch.Tensor:
        """Return token ids, int64 `[rows, length]`."""
        return torch.from_numpy(np.stack([self._row(length) for _ in range(rows)]))

    def _row(self, length: int) -> Tokens:
        source = self._rng.random()
        if source < self._mixture.text:
            return self._text_run(length)
        from_text = source < self._mixture.text + self._mixture.repeated_text
        draw = self._text_run if from_text else self._random_run
        # Log-uniform, so that short and long periods are equally frequent.
        bounds = np.log([_SHORTEST_PERIOD, length / self._mixture.copies])
        period = int(np.exp(self._rng.uniform(*bounds)))
        block = draw(period)
        if self._rng.random() >= self._mixture.gaps:
            return np.resize(np.roll(block, self._rng.integers(period)), length)
        pieces: list[Tokens] = []
        while sum(map(len, pieces)) < length:
            pieces += [block, draw(int(self._rng.integers(1, period)))]
        return np.concatenate(pieces)[:length]

    def _text_run(self, length: int) -> Tokens:
        start = self._rng.integers(len(self._text) - length)
        return self._text[start : start + length]

    def _random_run(self, length: int) -> Tokens:
        return distinct_tokens(self._rng, length)
