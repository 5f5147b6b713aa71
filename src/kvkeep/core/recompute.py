"""Load or recompute: state that takes longer to bring than to compute is not brought."""

from __future__ import annotations

from .policy import Policy
from .speed import Speed
from .transfer import Transfers


class Recompute:
    """Compares measured speeds. Until both sides are known, everything is brought."""

    def __init__(self, transfers: Transfers, policy: Policy) -> None:
        self._transfers, self._policy = transfers, policy
        self.prefill = Speed()  # tokens

    @property
    def possible(self) -> bool:
        """There is something to compare with."""
        return self._policy.recompute == "auto" and self.prefill.seconds(1) is not None

    def beats(self, seconds: float | None, tokens: int) -> bool:
        """Whether to compute ``tokens`` takes less than ``seconds``; None: not known."""
        computing = self.prefill.seconds(tokens) if self._policy.recompute == "auto" else None
        return seconds is not None and computing is not None and computing < seconds

    def beats_moving(self, kind: str, size: int, tokens: int) -> bool:
        """Whether it takes less than ``size`` more bytes on a lane, behind all that waits there."""
        return self.beats(self._transfers.seconds(kind, size), tokens)
