"""What both trainings share: phases, the learning rate schedule and the two optimizers."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_LOG_EVERY = 25  # steps


@dataclass(frozen=True, slots=True)
class Phase:
    """Training steps with batches of one shape."""

    steps: int
    rows: int
    length: int  # tokens per row


class Optimizers:
    """Muon (Jordan et al. 2024) for the hidden matrices, AdamW for everything else."""

    def __init__(self, module: nn.Module, muon_rate: float, adam_rate: float) -> None:
        """Split `module`'s parameters. AdamW also takes embeddings and output heads."""
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in module.named_parameters():
            vocabulary = "embed_tokens" in name or "lm_head" in name
            (others if vocabulary or parameter.dim() != 2 else matrices).append(parameter)
        self._module = module
        self._rates = (muon_rate, adam_rate)
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="original"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, loss: Tensor, scale: float) -> None:
        """Take one step with the gradient of `loss`; learning rates are multiplied by `scale`."""
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad()


def rate_scale(step: int, steps: int, warmup: int) -> float:
    """Return the learning rate's factor: linear warm-up, 1 to half of `steps`, linear to 0.03."""
    rising = min(1.0, (step + 1) / warmup)
    falling = min(1.0, max(0.03, 2 * (1 - step / steps)))
    return rising * falling


def train(
    name: str,
    phases: Sequence[Phase],
    warmup: int,
    optimizers: Optimizers,
    loss_of: Callable[[int, int], tuple[Tensor, str]],
) -> None:
    """Run all phases. `loss_of(rows, length)` returns a loss and a note for the log."""
    steps = sum(phase.steps for phase in phases)
    started = time.process_time()
    for step, phase in enumerate(_unrolled(phases)):
        loss, note = loss_of(phase.rows, phase.length)
        optimizers.step(loss, rate_scale(step, steps, warmup))
        if (step + 1) % _LOG_EVERY == 0 or step + 1 == steps:
            print(
                f"{name} step {step + 1}/{steps} rows {phase.rows}x{phase.length} "
                f"loss {loss.item():.3f} {note} cpu {time.process_time() - started:.0f}s",
                flush=True,
            )


def _unrolled(phases: Sequence[Phase]) -> Iterator[Phase]:
    for phase in phases:
        yield from [phase] * phase.steps
