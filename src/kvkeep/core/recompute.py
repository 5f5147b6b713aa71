"""Load or recompute: state that is slower to load than to recompute is recomputed."""

from __future__ import annotations

from .policy import Policy
from .speed import Speed
from .ticket import Route
from .transfer import Transfers


class Recompute:
    """Compares measured speeds. Until both are known, state is loaded."""

    def __init__(self, transfers: Transfers, policy: Policy) -> None:
        self._transfers, self._policy = transfers, policy
        self.prefill = Speed()  # tokens

    @property
    def possible(self) -> bool:
        """There is something to compare with."""
        return self._policy.recompute == "auto" and self.prefill.seconds(1) is not None

    def beats(self, seconds: float | None, tokens: int) -> bool:
        """Whether ``tokens`` are computed in less than ``seconds``; None: not known, so no."""
        computing = self.prefill.seconds(tokens) if self._policy.recompute == "auto" else None
        return seconds is not None and computing is not None and computing < seconds

    def beats_moving(self, route: Route, size: int, tokens: int) -> bool:
        """Whether that is less than ``size`` more bytes take, behind all tickets of a route."""
        return self.beats(self._transfers.seconds(route, size), tokens)
