"""The process that plays episodes: it answers, says what went wrong, and neither outlives its rank nor is missed when it dies."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from mcore_agent.config import load_config
from mcore_agent.coordinator import CoordinatorError, RemoteEngine, open_coordinator
from mcore_agent.parcel import Parcel
from mcore_agent.registry import create
from mcore_agent.rollout.errors import WeightUpdateError
from mcore_agent.weights.publish import PublishError, publish
from tests.fakes import hop_tokenizer
from tests.rollout.tiny import CONFIGS, checkpoint

ROOT = Path(__file__).parent.parent
WORDS = ("rollout.prompts=2", "rollout.group_size=2", "rollout.max_turns=2", "rollout.max_new=8", "run.steps=1", "batch.minibatches=1")
HF = {**CONFIGS["qwen3"], "vocab_size": 384, "max_position_embeddings": 1024}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    vocabulary = {"model.embed_tokens.weight", "lm_head.weight"}
    return {n: torch.randn(384, 36) * 0.3 if n in vocabulary else t for n, t in checkpoint("qwen3").items()}


@pytest.fixture(scope="module")
def coordinator():
    config = load_config(ROOT / "recipes/quickstart.yaml", WORDS)
    with open_coordinator(config) as opened:
        opened.call("open", HF, hop_tokenizer(), {})
        yield opened


def served(coordinator, version: int) -> RemoteEngine:
    engine = RemoteEngine(coordinator)

    async def body() -> None:
        await engine.wake()
        await publish({0: engine}, weights(version).items(), version, bucket_bytes=20_000)

    asyncio.run(body())
    coordinator.call("serve", version, {})
    return engine


def test_weights_arrive_bit_for_bit_and_episodes_come_back(coordinator):
    """The publish compares checksums; episodes equal those of an engine in this process."""
    served(coordinator, 0)
    seen: list[tuple[int, int]] = []
    episodes, numbers = coordinator.call("collect", 1, 0, progress=lambda *at: seen.append(at), serve=True)
    assert len(episodes) == 4 and numbers["rollout/episodes"] == 4 and seen[-1][0] == seen[-1][1]
    assert all(set(row.version[row.sampled]) == {0} for e in episodes for row in e.rows)
    again = coordinator.call("evaluate", 0, 3, True)
    assert len({e.task.id for e in again}) == 3


def test_a_drained_coordinator_plays_on_under_newer_weights(coordinator):
    engine = served(coordinator, 1)
    coordinator.call("drain")
    asyncio.run(engine.sleep())
    asyncio.run(engine.wake(("weights",)))
    asyncio.run(publish({0: engine}, weights(2).items(), 2))
    asyncio.run(engine.wake(("kv_cache",)))
    coordinator.call("serve", 2, {})
    episodes, _ = coordinator.call("collect", 2, 2)
    assert all(set(row.version[row.sampled]) == {2} for e in episodes for row in e.rows)


def test_state_comes_back(coordinator):
    before = coordinator.call("state")
    coordinator.call("collect", 3, 2)
    after = coordinator.call("state")
    assert before != after
    coordinator.call("load_state", before)
    assert coordinator.call("state") == before


def test_errors_keep_their_kind(coordinator):
    engine = RemoteEngine(coordinator)
    asyncio.run(engine.begin_update())
    with pytest.raises(WeightUpdateError, match=r"missing: .*norm"):
        asyncio.run(engine.end_update(9))
    with pytest.raises(PublishError, match=r"1 unknown: model\.extra"):
        asyncio.run(publish({0: engine}, [*weights().items(), ("model.extra", torch.zeros(3))], 9))
    with pytest.raises(KeyError, match="no_such_method"):
        coordinator.call("no_such_method")
    served(coordinator, 10)


def test_a_dead_coordinator_is_missed():
    config = load_config(ROOT / "recipes/quickstart.yaml", WORDS)
    with open_coordinator(config) as opened:
        opened.call("open", HF, hop_tokenizer(), {})
        os.kill(opened.pid, signal.SIGKILL)
        with pytest.raises(CoordinatorError, match=r"ended by SIGKILL.*memory is short"):
            while True:
                opened.call("state")


OWNER = """
import sys, time
from pathlib import Path
from mcore_agent.config import load_config
from mcore_agent.coordinator import open_coordinator
if __name__ == "__main__":
    with open_coordinator(load_config("recipes/quickstart.yaml", [])) as opened:
        Path(sys.argv[1]).write_text(str(opened.pid))
        time.sleep(600)
"""


@pytest.mark.defect("H2")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda n: n.name)
def test_it_does_not_outlive_its_rank(tmp_path, number):
    script, mark = tmp_path / "owner.py", tmp_path / "pid"
    script.write_text(OWNER)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, script, mark], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
    while not mark.is_file() or not mark.read_text():
        time.sleep(0.05)
    child = psutil.Process(int(mark.read_text()))
    time.sleep(1)
    owner.send_signal(number)
    owner.wait(30)
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.defect("E3", "E4")
def test_a_parcel_is_read_where_it_was_written():
    ours = Parcel()
    theirs = Parcel(os.dup(ours.descriptor))
    generator = np.random.default_rng(0)
    for size in (3, 1, 50):  # it grows, and a smaller content leaves nothing of a larger one
        bucket = [(f"t{i}", torch.from_numpy(generator.standard_normal((size, i)).astype(np.float32))) for i in range(5)]
        bucket += [("half", bucket[1][1].bfloat16()), ("empty", torch.zeros(0, 7, dtype=torch.int64)), ("scalar", torch.tensor(3.0))]
        found = dict(theirs.views(ours.pack(bucket)))
        assert list(found) == [name for name, _ in bucket]
        for name, tensor in bucket:
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    assert theirs.views(ours.pack([])) is not None and list(theirs.views(ours.pack([]))) == []
    del found
    ours.close()
    theirs.close()


def test_the_engine_in_the_coordinator_is_the_local_one(coordinator):
    """What the coordinator plays equals what an engine in this process plays, seed for seed."""
    from mcore_agent.agent.episode import Agent, Limits
    from mcore_agent.agent.parse import HermesParser
    from mcore_agent.agent.render import ChatRenderer
    from mcore_agent.rollout.collect import Collector

    config = load_config(ROOT / "recipes/quickstart.yaml", WORDS)
    served(coordinator, 11)
    theirs = coordinator.call("evaluate", 0, 4, False)

    async def body():
        engine = create("engine", {"name": "local"}, hf_config=HF)
        domain = create("env", config.env)
        await engine.wake()
        await publish({0: engine}, weights(11).items(), 11)
        parser, limits = HermesParser(tuple(domain.tools)), Limits(2, 8, config.rollout.max_tokens)
        agent = Agent(ChatRenderer(hop_tokenizer(), domain.tools), parser, limits)
        source = create("source", {"name": "epochs", "seed": 0}, domain=domain)
        collector = Collector(engine, domain, agent, source, run_seed=0, prompts=1, group_size=1)
        tasks = [domain.task("eval", i) for i in range(4)]
        ours, _ = await collector.evaluate(tasks, run_seed=config.run.seed, sampling=collector.sampling)
        await engine.close()
        return ours

    for a, b in zip(theirs, asyncio.run(body()), strict=True):
        assert [row.tokens.tolist() for row in a.rows] == [row.tokens.tolist() for row in b.rows]
        assert all(np.array_equal(x.logp, y.logp) for x, y in zip(a.rows, b.rows, strict=True))


def test_a_silent_coordinator_is_told_of(caplog):
    """A wait for a stopped process looks like a long episode; whoever waits says that nothing is heard."""
    with open_coordinator(load_config(ROOT / "recipes/quickstart.yaml", [*WORDS, "run.late_s=0.5"])) as coordinator:
        coordinator.call("open", HF, hop_tokenizer(), {})
        os.kill(coordinator.pid, signal.SIGSTOP)
        thaw = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(3); os.kill({coordinator.pid}, 18)"])
        coordinator.call("drain")
        thaw.wait()
    assert f"nothing heard from the coordinator (process {coordinator.pid})" in caplog.text
