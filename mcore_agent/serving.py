"""Engines and learner by turns: every hand-over is a transition of the table, on every rank, and survives the death of an engine."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch.distributed as dist

from ckpt_convert.mcore_folder import TENSORS
from mcore_agent.config import Config
from mcore_agent.coordinator import Coordinator
from mcore_agent.engines import Engines, owners
from mcore_agent.learner.groups import Groups
from mcore_agent.learner.learner import Learner
from mcore_agent.learner.offload import Offload
from mcore_agent.learner.wait import Line
from mcore_agent.protocols import EngineDown
from mcore_agent.rollout.states import COLOCATED, PLACEMENTS, TimeSlicer, residual_memory
from mcore_agent.rollout.watchdog import Watchdog
from mcore_agent.weights.export import export, owners_of
from mcore_agent.weights.quantize import quantization_config, quantized

log = logging.getLogger(__name__)
LIVES = 3  # times that engines may die of one and the same publish
ASLEEP = ("weights", "kv_cache", "cuda_graph")  # what engines give back while the learner has the memory


class Serving:
    """Methods are collective unless they say otherwise. The coordinator is rank 0's; engines are where their GPUs are.

    ``learners`` are all that sleep and wake, the policy's under TENSORS; ``save`` is what the event of that name does.
    """

    def __init__(
        self,
        config: Config,
        hf_config: dict[str, Any],
        groups: Groups,
        line: Line,
        coordinator: Coordinator | None,
        learners: Mapping[str, Learner],
        save: Callable[..., Any],
        stack: ExitStack,
    ):
        self.quantized, self.folder = config.rollout.fp8 != "off", config.run.dir
        if self.quantized:
            names = learners[TENSORS].model.family.shapes()
            hf_config = hf_config | {"quantization_config": quantization_config(names)}
        self.hf_config, self.groups, self.line, self.coordinator = hf_config, groups, line, coordinator
        self.learners, self.learner = learners, learners[TENSORS]
        self.version = self.served = -1  # of the weights: those to be served, and those that are
        watchdog = Watchdog(groups.rank, config.world, config.run.late_s, log.warning, line.store)
        stack.callback(watchdog.close)
        self.owners = owners_of(owners(config).values())
        self.engines = Engines(config, hf_config, groups.rank, coordinator, watchdog, stack)
        if coordinator:
            stack.callback(coordinator.close)  # before the engines: nobody is to miss them
        self.turns = PLACEMENTS[config.rollout.placement]
        self.slicer = TimeSlicer(self._hooks(save), measure=self._memory, turns=self.turns, watch=watchdog)
        line.orders["recover"] = partial(self.slicer.fire, "recover")
        if coordinator:
            coordinator.on_event = self._event

    def open(self, tokenizer: Any) -> None:
        """Collective: the coordinator gets to know the engines. Rank 0 gives the tokenizer."""
        addresses = self._addresses()
        if self.coordinator:
            self.coordinator.call("open", self.hf_config, tokenizer, addresses)
        if self.turns is not COLOCATED:
            self.engines.each(lambda engine: engine.wake(ASLEEP), "wake")

    def _addresses(self) -> dict[int, tuple[int, Any]]:
        """Of all engines, on every rank."""
        return {number: where for mine in self._told(self.engines.addresses()) for number, where in mine.items()}

    def _told(self, value: Any) -> list[Any]:
        """What every rank says."""
        world = self.groups.layout.world
        if world == 1:
            return [value]
        told: list[Any] = [None] * world
        dist.all_gather_object(told, value)
        return told

    def play(self, name: str, *arguments: Any, progress: Any = None) -> Any:
        """Rank 0: the coordinator's episodes. Engines that die meanwhile are started again, with help from all ranks."""
        assert self.coordinator
        return self.coordinator.call(name, *arguments, progress=progress, serve=True)

    def _event(self, name: str, value: Any) -> None:
        """Rank 0, while episodes are played."""
        assert name == "engine_down", name
        self.line.order("recover", *value)

    def _hooks(self, save: Callable[..., Any]) -> dict[str, Any]:
        every = self.engines.each
        ours = {
            "update": Learner.step,
            "publish": self._publish,
            "rollout": self._rollout,
            "recover": self._recover,
            "save": save,
        }
        if self.turns is not COLOCATED:
            return ours | {"pause": self._pause}
        return ours | {
            "drain": partial(self.tell, "drain"),
            "sleep_engine": lambda: every(lambda engine: engine.sleep(ASLEEP), "sleep"),
            "wake_learner": partial(self._offload, Offload.wake),
            "trim": partial(self._offload, Offload.trim),
            "wake_weights": self._wake_weights,
            "sleep_learner": partial(self._offload, Offload.sleep),
            "wake_engine": lambda: every(lambda engine: engine.wake(ASLEEP[1:]), "wake"),
        }

    def tell(self, name: str, *arguments: Any) -> None:
        """The coordinator does it; nothing on ranks that have none. Not collective."""
        if self.coordinator:
            self.coordinator.call(name, *arguments)

    def _offload(self, act: Callable[[Offload], None]) -> None:
        for learner in self.learners.values():
            act(learner.offload)

    def _memory(self) -> dict[str, int]:
        return residual_memory() | dict(self.engines.memory())

    def _pause(self) -> None:
        self.tell("hold")
        self.engines.each(lambda engine: engine.pause(), "pause")

    def _wake_weights(self) -> None:
        self.engines.check()
        self.engines.revive()
        self.engines.each(lambda engine: engine.wake(ASLEEP[:1]), "wake")

    def _publish(self) -> None:
        """Until every engine serves the learner's weights; one that dies is started again and gets them again."""
        self._until_served(None)

    def _until_served(self, chosen: list[int] | None) -> None:
        for _ in range(LIVES):
            self._send(chosen)
            chosen = self._revive()
            if not chosen:
                return
        logs = f"; their logs are in {self.folder}/engines" if self.folder else ""
        raise EngineDown(f"engines {chosen} died {LIVES} times while they got weight version {self.version}{logs}")

    def _revive(self) -> list[int]:
        """Starts the dead again, without weights; which they are, of all ranks."""
        mine = self.engines.revive()
        if mine:
            tags = ASLEEP[:1] if self.turns is COLOCATED else ASLEEP
            self.engines.each(lambda engine: engine.wake(tags), "wake")
        return sorted(number for told in self._told(mine) for number in told)

    def _send(self, chosen: Sequence[int] | None) -> None:
        self.learner.offload.need("publish its weights", parameters_only=True)
        tensors = export(self.learner.model, self.owners)
        self.engines.publish(quantized(tensors) if self.quantized else tensors, self.version, chosen)

    def _rollout(self) -> None:
        """Engines that died since the publish are started again first."""
        if self.turns is not COLOCATED:
            self.engines.each(lambda engine: engine.resume(), "resume")
        self._recover()

    def _recover(self, *lost: Any) -> None:
        """Dead engines are started again and get the weights that the others serve, from a learner that may be asleep.

        ``lost``: (engine, how often it was started, reason) of one that the coordinator has given up, because it is frozen say.
        """
        if lost:
            self.engines.lost(*lost)
        self.engines.check()
        again = self._revive()
        if again:
            with self.learner.offload.parameters():
                self._until_served(again)
            self.engines.each(lambda engine: engine.wake(ASLEEP[1:]), "wake")
        self.tell("serve", self.version, self._addresses())

    def serve(self, version: int) -> None:
        """The engines serve the learner's weights, which are ``version``."""
        if self.served == version and self.slicer.serving:
            return
        self.version = version
        self.slicer.serve()
        self.served = version

    def handovers(self) -> dict[str, float]:
        """Residual memory (MB) after each transition since the last call, by the state that it led to."""
        found = {f"memory/{h.after}/{kind}_mb": size / 2**20 for h in self.slicer.log for kind, size in h.memory.items()}
        self.slicer.log.clear()
        return found
