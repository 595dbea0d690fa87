"""The parallel layout of a learner: how many ranks share what, and which layouts can be."""

from dataclasses import dataclass


class LayoutError(ValueError):
    """A parallel layout that cannot be: the message names the key (``key``), the value, the reason and a way out."""

    def __init__(self, message: str, key: str = "learner"):
        super().__init__(message)
        self.key = key


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
                raise LayoutError(f"learner.{key} is {getattr(self, key)}; it counts ranks or parts, so it is at least 1", f"learner.{key}")
        if self.world > MOST_RANKS:
            largest = max(("tp", "cp", "dp", "pp"), key=lambda key: getattr(self, key))
            most = MOST_RANKS // (self.world // getattr(self, largest))
            raise LayoutError(
                f"learner.{largest} is {getattr(self, largest)}, which makes {self.world} ranks; at most {MOST_RANKS} can be: "
                + (f"set learner.{largest} to at most {most}" if most else "lower tp, cp, dp and pp"),
                f"learner.{largest}",
            )
        if self.stage_ranks % self.etp:
            legal = [n for n in range(1, self.stage_ranks + 1) if self.stage_ranks % n == 0]
            raise LayoutError(
                f"learner.etp is {self.etp}, but a pipeline stage has {self.stage_ranks} ranks (tp * cp * dp): an expert is split over "
                f"those, so etp must divide them; set learner.etp to {min(legal, key=lambda n: (abs(n - self.etp), n))}",
                "learner.etp",
            )
        if self.stage_ranks % (self.ep * self.etp):
            raise LayoutError(
                f"learner.ep * learner.etp is {self.ep} * {self.etp}, but a pipeline stage has {self.stage_ranks} ranks (tp * cp * dp): "
                f"experts are split over those, so ep * etp must divide them; set learner.ep to {self._nearest_ep()}",
                "learner.ep",
            )
        if self.vpp > 1 and self.pp == 1:
            message = f"learner.vpp is {self.vpp} but learner.pp is 1: there are no stages to interleave; set learner.vpp to 1"
            raise LayoutError(message, "learner.vpp")
        if self.sp and self.tp == 1:
            message = "learner.sp is on but learner.tp is 1: there are no ranks to split over; switch learner.sp off"
            raise LayoutError(message, "learner.sp")

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
            raise LayoutError(
                f"learner.sp is off, but learner.tp is {self.tp} and the model has experts: Megatron trains experts under tensor "
                "parallelism only with sequence parallelism; switch learner.sp on",
                "learner.sp",
            )
        if not experts and self.ep > 1:
            raise LayoutError(f"learner.ep is {self.ep}, but the model has no experts to split; set learner.ep to 1", "learner.ep")
        if not experts and self.etp != self.tp:
            message = f"learner.etp is {self.etp}, but the model has no experts to split; leave it out, or set it to 0 (as learner.tp)"
            raise LayoutError(message, "learner.etp")
