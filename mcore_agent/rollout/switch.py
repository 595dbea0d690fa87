"""A switch with hysteresis: on at low load, off at high load, and no flapping between."""

from dataclasses import dataclass


@dataclass
class Switch:
    """Drafting pays while few requests run and costs while many do (M115).

    ``step(running)`` says whether it is on: from ``patience`` steps in a row with at most ``low`` requests, until
    ``patience`` steps in a row with at least ``high``. Between the two it stays as it is. Raises ValueError unless
    0 <= low < high and patience >= 1.
    """

    low: int
    high: int
    patience: int = 4
    on: bool = False
    _against: int = 0  # steps in a row that ask for a change

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high or self.patience < 1:
            raise ValueError(f"low is {self.low}, high is {self.high}, patience is {self.patience}; needed: 0 <= low < high, patience >= 1")

    def step(self, running: int) -> bool:
        """One look at how many requests run; returns whether it is on."""
        wanted = running < self.high if self.on else running <= self.low
        self._against = 0 if wanted == self.on else self._against + 1
        if self._against >= self.patience:
            self.on, self._against = wanted, 0
        return self.on
