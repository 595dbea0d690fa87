"""The parallel layout of a learner: how many ranks share what, and which layouts can be."""

from dataclasses import dataclass
from typing import Any


class LayoutError(ValueError):
    """A parallel layout that cannot be: ``reason`` holds the way out too, and ``key`` and ``value`` what breaks the rule."""

    def __init__(self, reason: str, key: str = "learner", value: Any = None):
        super().__init__(reason if value is None else f"{key} is {value}: {reason}")
        self.key, self.reason = key, reason


MOST_RANKS = 1 << 20  # no cluster has more


@dataclass(frozen=True)
class Layout:
    """How many ranks share what. ``world = tp * cp * dp * pp``.

    ``tp`` ranks split tensors, ``cp`` the tokens of a micro-batch, ``dp`` the micro-batches, ``pp`` the layers (each
    stage holds ``vpp`` separate parts of them). The experts of a layer are split over ``ep`` ranks and each expert over
    ``etp`` (0: as ``tp``); both are taken from the ``tp * cp * dp`` ranks of a stage. ``sp``: activations between
    tensor-parallel regions are split over the ``tp`` ranks by token.

    >>> Layout(tp=2, dp=4, ep=2).world
    8
    >>> Layout(tp=2, sp=True).etp
    2
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    dp: int = 1
    sp: bool = False

    def __post_init__(self):
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)
        for key in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp"):
            if getattr(self, key) < 1:
                raise self._refusal(key, "it counts ranks or parts, so it is at least 1")
        if self.world > MOST_RANKS:
            largest = max(("tp", "cp", "dp", "pp"), key=lambda key: getattr(self, key))
            most = MOST_RANKS // (self.world // getattr(self, largest))
            way_out = f"set learner.{largest} to at most {most}" if most else "lower tp, cp, dp and pp"
            raise self._refusal(largest, f"that makes {self.world} ranks, and at most {MOST_RANKS} can be; {way_out}")
        stage = f"a pipeline stage has {self.stage_ranks} ranks (tp * cp * dp)"
        if self.stage_ranks % self.etp:
            legal = [n for n in range(1, self.stage_ranks + 1) if self.stage_ranks % n == 0]
            nearest = min(legal, key=lambda n: (abs(n - self.etp), n))
            raise self._refusal("etp", f"{stage}, over which an expert is split, and it must divide them; set learner.etp to {nearest}")
        if self.stage_ranks % (self.ep * self.etp):
            raise self._refusal(
                "ep",
                f"{stage}, over which experts are split, and ep * etp = {self.ep} * {self.etp} must divide them; "
                f"set learner.ep to {self._nearest_ep()}",
            )
        if self.vpp > 1 and self.pp == 1:
            raise self._refusal("vpp", "learner.pp is 1, so there are no stages to interleave; set learner.vpp to 1")
        if self.sp and self.tp == 1:
            raise self._refusal("sp", "learner.tp is 1, so there are no ranks to split over; switch learner.sp off")

    def _refusal(self, key: str, reason: str) -> LayoutError:
        value = getattr(self, key)
        return LayoutError(reason, f"learner.{key}", {True: "on", False: "off"}[value] if key == "sp" else value)

    def _nearest_ep(self) -> int:
        legal = [n for n in range(1, self.stage_ranks + 1) if self.stage_ranks % (n * self.etp) == 0]
        return min(legal, key=lambda n: (abs(n - self.ep), n))

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def replica(self) -> int:
        """Ranks that work on the same micro-batch."""
        return self.tp * self.cp * self.pp

    @property
    def expert_dp(self) -> int:
        """Ranks of a stage that hold the same expert parameters."""
        return self.stage_ranks // (self.ep * self.etp)

    @property
    def world(self) -> int:
        return self.stage_ranks * self.pp

    def check_experts(self, experts: int) -> None:
        """Raises LayoutError when a model with that many experts cannot be trained so."""
        if experts and self.tp > 1 and not self.sp:
            raise self._refusal(
                "sp",
                f"learner.tp is {self.tp} and the model has experts: Megatron trains experts under tensor parallelism only with "
                "sequence parallelism; switch learner.sp on",
            )
        if not experts and self.ep > 1:
            raise self._refusal("ep", "the model has no experts to split; set learner.ep to 1")
        if not experts and self.etp != self.tp:
            raise self._refusal("etp", "the model has no experts to split; leave it out, or set it to 0 (as learner.tp)")
