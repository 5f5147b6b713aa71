"""Load or recompute: state that is slower to load than to recompute is recomputed."""

from __future__ import annotations

from .policy import Policy
from .speed import Speed
from .ticket import Route
from .transfer import Transfers


class Recompute:
    """Compares measured speeds; until both are known, state is loaded."""

    def __init__(self, transfers: Transfers, policy: Policy) -> None:
        self._transfers, self._policy = transfers, policy
        self.prefill = Speed()  # tokens

    @property
    def possible(self) -> bool:
        """The policy allows it and prefill has been measured."""
        return self._policy.recompute == "auto" and self.prefill.known

    def beats(self, seconds: float | None, tokens: int) -> bool:
        """Whether computing ``tokens`` takes less than ``seconds``; False if either is unknown."""
        computing = self.prefill.seconds(tokens) if self._policy.recompute == "auto" else None
        return seconds is not None and computing is not None and computing < seconds

    def beats_moving(self, route: Route, size: int, tokens: int) -> bool:
        """Whether computing is faster than moving ``size`` bytes behind a route's tickets."""
        return self.beats(self._transfers.seconds(route, size), tokens)
