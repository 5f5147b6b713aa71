"""Trains the target: next-token prediction on text and repetitions."""

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from .data import VOCAB_SIZE, Corpus, Mixture, Sampler
from .model import new_target
from .optimize import Optimizers, Phase, train
from .structure import structure_target

_PHASES = (Phase(300, 8, 256), Phase(210, 2, 1024), Phase(90, 1, 2304))
_MIXTURE = Mixture(text=0.3, repeated_text=0.3, gaps=0.5, copies=2)
_WARMUP = 50


def train_target(corpus: Corpus, seed: int = 0) -> LlamaForCausalLM:
    """Return a trained target with fp32 weights. Training uses bf16 autocast."""
    torch.manual_seed(seed)
    sampler = Sampler(corpus, _MIXTURE, seed)
    target = new_target()
    structure_target(target)
    target.train()

    def loss_of(rows: int, length: int) -> tuple[Tensor, str]:
        tokens = sampler.batch(rows, length + 1)
        with torch.autocast("cpu", torch.bfloat16):
            logits = target(tokens[:, :-1], use_cache=False).logits
        labels = tokens[:, 1:].flatten()
        logits = logits.float().view(-1, VOCAB_SIZE)
        hits = (logits.argmax(-1) == labels).float().mean().item()
        return functional.cross_entropy(logits, labels), f"accuracy {hits:.2f}"

    train("target", _PHASES, _WARMUP, Optimizers(target, 0.01, 3e-3), loss_of)
    return target.eval()
