"""What runs in the coordinator's process: environments, engines' clients, collection. Rank 0 calls its methods by name."""

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from mcore_agent.agent.episode import Agent, Limits, Sampling
from mcore_agent.agent.render import ChatRenderer
from mcore_agent.config import Config, ConfigError
from mcore_agent.credit.pipeline import Pipeline
from mcore_agent.parcel import Packed, Parcel
from mcore_agent.processes import own_memory
from mcore_agent.protocols import Completion, Engine, Request, TaskSource
from mcore_agent.registry import create, get
from mcore_agent.rollout.collect import Collector, Progress
from mcore_agent.rollout.pool import Pool
from mcore_agent.rollout.router import CacheRouter
from mcore_agent.rollout.switch import Switch
from mcore_agent.types import Episode

Addresses = Mapping[int, tuple[int, Any]]  # engine -> (how often it was started, where it is)
BUFFER = "buffer.npz"


class Host:
    """Methods in ``calls`` answer rank 0; those in ``reports`` also say how far they are.

    ``report(name, value)`` tells rank 0 something unasked: ``engine_down`` with (engine, how often it was started, reason).
    """

    reports = frozenset({"collect", "evaluate"})

    def __init__(self, config: Config, parcel: Parcel):
        self.config, self.parcel = config, parcel
        self.report: Callable[[str, Any], None] = lambda name, value: None
        self._stack = AsyncExitStack()
        self._starts: dict[int, int] = {}
        methods = (
            *(self.open, self.collect, self.evaluate, self.drain, self.hold, self.serve, self.engine, self.update),
            *(self.state, self.load_state, self.save, self.load, self.stop),
        )
        self.calls = {method.__name__: method for method in methods}

    async def open(self, hf_config: dict[str, Any], tokenizer: Any, addresses: Addresses) -> None:
        """Makes everything; engines that live elsewhere are at ``addresses``."""
        c = self.config
        self.hf_config = hf_config
        self.domain = create("env", c.env)
        self.source: TaskSource = create("source", {"name": "epochs", "seed": c.run.seed}, domain=self.domain)
        limits = Limits(c.rollout.max_turns, c.rollout.max_new, c.rollout.max_tokens)
        parser = create("parser", {"name": c.rollout.parser}, tools=tuple(self.domain.tools))
        agent = Agent(ChatRenderer(tokenizer, self.domain.tools), parser, limits)
        self._starts = {number: starts for number, (starts, _) in addresses.items()}
        own = get("engine", c.rollout.engine).own_process
        self.engines = [self._attach(where) for _, (_, where) in sorted(addresses.items())] if own else [self._local()]
        for engine in self.engines:
            self._stack.push_async_callback(engine.close)
        self.pool = Pool(self.engines, CacheRouter(), stall_s=c.rollout.stall_s, on_down=self._lost)
        self.switch = Switch(c.rollout.draft_low, c.rollout.draft_high)
        self.pool.hold()
        await self._stack.enter_async_context(self.pool.watching())
        experts = c.learner.routing_replay == "rollout"
        if experts and "routing" not in self.pool.capabilities():
            raise ConfigError("learner.routing_replay", "rollout", f"the {c.rollout.engine} engine reports no experts as it is set up",
                              "Use old, or give the engine's option for it")  # fmt: skip
        self.sampling = Sampling(c.rollout.temperature, c.rollout.top_p, c.rollout.top_k, experts)
        waves = None if own else self.engines[0].away  # type: ignore[attr-defined]
        self.collector = Collector(
            self.pool,  # type: ignore[arg-type]
            self.domain,
            agent,
            self.source,
            run_seed=c.run.seed,
            prompts=c.rollout.prompts,
            group_size=c.rollout.group_size,
            max_retries=c.rollout.retries,
            max_lag=c.rollout.max_lag,
            over_sample=c.rollout.over_sample,
            sampling=self.sampling,
            branches=Pipeline(c.credit).branches,
            away=waves,
            on_turn=self._turn,
        )
        self._stack.push_async_callback(self.collector.stop)

    def _turn(self, request: Request, completion: Completion) -> None:
        """Drafting pays while few requests run (M115)."""
        running = self.pool.running
        for engine in self.engines:
            if "drafting" in engine.capabilities():
                engine.drafting_on = self.switch.step(running)  # type: ignore[attr-defined]

    def _lost(self, number: int, reason: str) -> None:
        self.report("engine_down", (number, self._starts.get(number, 0), reason))

    def _spec(self) -> dict[str, Any]:
        c = self.config
        return {"name": c.rollout.engine, "dtype": c.precision.dtype, "max_batch": c.rollout.max_batch, **c.rollout.options}

    def _local(self) -> Engine:
        return create("engine", self._spec(), hf_config=self.hf_config)

    def _attach(self, address: Any) -> Engine:
        return create("engine", self._spec(), hf_config=self.hf_config, address=address)

    # ------------------------------------------------------------------------------------------------- episodes

    async def collect(self, step: int, version: int, progress: Progress) -> tuple[list[Episode], dict[str, float]]:
        """The step's episodes, to be learned from by weights of ``version``, and what happened."""
        episodes, stats = await self.collector.collect(step, version, progress)
        return episodes, stats.metrics() | self.pool.stats()

    async def evaluate(self, step: int, count: int, greedy: bool, progress: Progress) -> list[Episode]:
        """The first ``count`` tasks of the evaluation split, each once."""
        split = self.config.run.eval_split
        tasks = [self.domain.task(split, i) for i in range(count)]
        sampling = Sampling(temperature=0.0) if greedy else self.sampling
        episodes, _ = await self.collector.evaluate(tasks, run_seed=self.config.run.seed, step=step, sampling=sampling, progress=progress)
        return episodes

    async def drain(self) -> None:
        """No engine has a request; above a lag of 0 they go on when engines serve again."""
        await self.pool.drain(keep=self.config.rollout.max_lag > 0)

    async def hold(self) -> None:
        """No engine gets a new request."""
        self.pool.hold()

    async def serve(self, version: int, addresses: Addresses) -> None:
        """Engines serve ``version``: episodes go on. Restarted ones are where ``addresses`` says."""
        again = {number: found for number, found in addresses.items() if found[0] != self._starts[number]}
        for number in again:
            self.pool.engine_down(number, "it was started again")
        for number in self.pool.alive:
            await self._know(self.engines[number])
        for number, (starts, where) in again.items():
            await self._back(number, starts, where)
        self.collector.advance(version)
        self.pool.release()

    async def _know(self, engine: Engine) -> None:
        """Others have given an engine of its own process new weights."""
        if get("engine", self.config.rollout.engine).own_process:
            await engine.sync()  # type: ignore[attr-defined]

    async def _back(self, number: int, starts: int, address: Any) -> None:
        """A restarted engine has its weights."""
        lost, engine = self.engines[number], self._attach(address)
        await self._know(engine)
        self._starts[number], self.engines[number] = starts, engine
        self._stack.push_async_callback(engine.close)
        self.pool.engine_back(number, engine)
        await lost.close()

    async def stop(self) -> None:
        """Nothing is played any more."""
        await self.collector.stop()

    # ------------------------------------------------------------------------------- the engine in this process

    async def engine(self, method: str, *arguments: Any) -> Any:
        """A method of the engine in this process."""
        found = await getattr(self.engines[0], method)(*arguments)
        return found | {"rss": own_memory()} if method == "memory" else found

    async def update(self, packed: Packed) -> None:
        """A bucket of weights, in the parcel."""
        await self.engines[0].update(self.parcel.views(packed))

    # ---------------------------------------------------------------------------------------------------- state

    async def state(self) -> dict[str, Any]:
        """For JSON: what a resumed run needs to draw the same tasks."""
        return {"source": self.source.state_dict(), "collector": self.collector.state_dict()}

    async def load_state(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        self.collector.load_state_dict(state["collector"])

    async def save(self, folder: Path) -> None:
        """Groups that are complete and wait, as a file of a checkpoint."""
        self.collector.save(folder / BUFFER)

    async def load(self, folder: Path) -> None:
        if (folder / BUFFER).is_file():
            self.collector.load(folder / BUFFER)

    async def close(self) -> None:
        await self._stack.aclose()
