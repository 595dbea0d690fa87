"""A publish is verified: exact names, equal bits, the version (I9); and whatever happens, nobody is left waiting."""

import asyncio
from collections.abc import Iterable, Iterator

import pytest
import torch

from mcore_agent.protocols import EngineDown
from mcore_agent.registry import create
from mcore_agent.weights.publish import PublishError, publish
from tests.learner.models import KINDS, config_of, weights_of

NAME = "model.layers.1.mlp.down_proj.weight"


async def engine_of(kind: str, awake: bool = True):
    engine = create("engine", {"name": "local"}, hf_config=config_of(kind, True))
    if awake:
        await engine.wake()
    return engine


class Counting:
    """A stream that knows whether it was read to its end."""

    def __init__(self, tensors: dict[str, torch.Tensor], drop: str = "", add: str = "", twice: str = ""):
        self.tensors, self.drop, self.add, self.twice = tensors, drop, add, twice
        self.exhausted = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            if name == self.add or name == self.twice:
                yield (name if name == self.twice else "model.layers.7.mlp.down_proj.weight"), tensor
            if name != self.drop:
                yield name, tensor
        self.exhausted = True


@pytest.mark.parametrize("kind", KINDS)
def test_publish(kind):
    async def main() -> None:
        engine = await engine_of(kind)
        weights = weights_of(kind, True)
        report = await publish({0: engine}, weights.items(), 4, bucket_bytes=5000)
        assert (report.version, report.tensors) == (4, len(weights)) and engine.version == 4
        assert report.bytes == sum(t.nbytes for t in weights.values())
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(("stream", "message"), [
    ({"drop": NAME}, NAME),
    ({"add": NAME}, "model.layers.7.mlp.down_proj.weight"),
    ({"twice": NAME}, f"{NAME} was exported twice"),
], ids=str)  # fmt: skip
def test_wrong_names(stream, message):
    async def main() -> None:
        engine = await engine_of("llama")
        tensors = Counting(weights_of("llama", True), **stream)
        with pytest.raises(PublishError, match=message):
            await publish({0: engine}, tensors, 1, bucket_bytes=5000)
        assert tensors.exhausted, "other ranks would wait in the middle of an export"
        await publish({0: engine}, weights_of("llama", True).items(), 2)  # the failed update was closed
        assert engine.version == 2
        await engine.close()

    asyncio.run(main())


class Careless:
    """An engine that does what engines have been seen to do: skip a name and say that all went well, or serve other bits."""

    def __init__(self, inner, skip: str = "", flip: str = ""):
        self.inner, self.skip, self.flip = inner, skip, flip

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    async def update(self, bucket: Iterable[tuple[str, torch.Tensor]]) -> None:
        await self.inner.update([(n, t.view(torch.int32).bitwise_xor(1).view(t.dtype) if n == self.flip else t) for n, t in bucket])

    async def checksum(self) -> dict[str, str]:
        return {name: value for name, value in (await self.inner.checksum()).items() if name != self.skip}


@pytest.mark.parametrize(("fault", "message"), [
    ({"flip": NAME}, f"served with other bits than given: {NAME}"),
    ({"skip": NAME}, f"given but not served: {NAME}"),
], ids=str)  # fmt: skip
def test_careless_engine(fault, message):
    async def main() -> None:
        engine = Careless(await engine_of("llama"), **fault)
        with pytest.raises(PublishError, match=message):
            await publish({0: engine}, weights_of("llama", True).items(), 1)
        await engine.close()

    asyncio.run(main())


def test_engine_asleep():
    async def main() -> None:
        engine = await engine_of("llama", awake=False)
        tensors = Counting(weights_of("llama", True))
        with pytest.raises(PublishError, match="sleep"):
            await publish({0: engine}, tensors, 1)
        assert tensors.exhausted
        await engine.close()

    asyncio.run(main())


class Mortal(Careless):
    """An engine whose process dies at its ``nth`` bucket."""

    def __init__(self, inner, nth: int):
        super().__init__(inner)
        self.left = nth

    async def update(self, bucket: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.left -= 1
        if self.left == 0:
            raise EngineDown("connection refused")
        await super().update(bucket)


@pytest.mark.defect("H1")
def test_an_engine_that_dies_keeps_no_other_from_its_weights():
    async def main() -> None:
        engines = {0: await engine_of("llama"), 1: Mortal(await engine_of("llama"), 3), 2: await engine_of("llama")}
        tensors = Counting(weights_of("llama", True))
        report = await publish(engines, tensors, 1, bucket_bytes=5000)
        assert report.down == {1: "connection refused"} and tensors.exhausted
        assert engines[0].version == engines[2].version == 1
        assert await engines[0].checksum() == await engines[2].checksum()
        for engine in engines.values():
            await engine.close()

    asyncio.run(main())
