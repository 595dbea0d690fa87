"""Giving engines the new weights, and not believing them before they show the same bits (I9)."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ckpt_convert.checksum import tensor_checksum
from mcore_agent.protocols import Engine, EngineDown

BUCKET_BYTES = 256 << 20
SHOWN = 8


class PublishError(RuntimeError):
    """The engine does not serve the weights that it was given; the message names the tensors."""


@dataclass(frozen=True)
class PublishReport:
    version: int
    tensors: int
    bytes: int
    seconds: float  # of which verify_s for the comparison
    verify_s: float
    down: Mapping[int, str]  # engines that were lost on the way, and why; the others serve the version


async def publish(
    engines: Mapping[int, Engine], tensors: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int = BUCKET_BYTES
) -> PublishReport:
    """Sends all tensors in buckets of at most ``bucket_bytes`` (or one tensor), then compares checksums name by name.

    ``tensors`` is exhausted in any case, because other ranks take part in making it, and an update that was begun
    is ended. Raises PublishError when a name is missing, unknown or given twice, or when bits differ. An engine that
    dies does not keep the others from their weights.
    """
    start = time.monotonic()
    sent: dict[str, str] = {}
    stream = iter(tensors)
    fan, size = _Fan(engines), 0
    try:
        await fan.each(lambda engine: engine.begin_update())
        for bucket in _buckets(stream, bucket_bytes):
            for name, tensor in bucket:
                if name in sent:
                    raise PublishError(f"{name} was exported twice")
                sent[name] = tensor_checksum(tensor)
                size += tensor.nbytes
            await fan.each(_update(bucket))
        await fan.each(lambda engine: engine.end_update(version))
    except (ValueError, RuntimeError) as e:
        for _ in stream:
            pass
        await fan.close(version)
        raise PublishError(f"weight version {version} was not published after {len(sent)} tensors: {e}") from e
    compared = time.monotonic()
    for number, served in (await fan.each(lambda engine: engine.checksum())).items():
        _compare(sent, served, version)
        if engines[number].version != version:
            raise PublishError(f"engine {number} serves version {engines[number].version} after version {version} was published")
    end = time.monotonic()
    return PublishReport(version, len(sent), size, end - start, end - compared, fan.down)


def _update(bucket: list[tuple[str, Tensor]]) -> Callable[[Engine], Awaitable[None]]:
    return lambda engine: engine.update(bucket)


class _Fan:
    """The same call to every engine at once; those that die leave."""

    def __init__(self, engines: Mapping[int, Engine]):
        self.engines = dict(engines)
        self.down: dict[int, str] = {}

    async def each(self, call: Callable[[Engine], Awaitable[Any]]) -> dict[int, Any]:
        """What each engine answered. Raises the first error that is not an EngineDown, after all have answered."""
        numbers = list(self.engines)
        answers = await asyncio.gather(*(call(self.engines[n]) for n in numbers), return_exceptions=True)
        found: dict[int, Any] = {}
        for number, answer in zip(numbers, answers, strict=True):
            if isinstance(answer, EngineDown):
                self.down[number] = str(answer)
                del self.engines[number]
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[number] = answer
        return found

    async def close(self, version: int) -> None:
        """Ends an update that failed. Engines refuse it, as they must; that it is over is what counts."""
        await asyncio.gather(*(engine.end_update(version) for engine in self.engines.values()), return_exceptions=True)


def _buckets(stream: Iterator[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Copies, because a tensor of the stream is only valid until the next one."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in stream:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.detach().clone()))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _compare(sent: dict[str, str], served: dict[str, str], version: int) -> None:
    different = [name for name in sent if name in served and served[name] != sent[name]]
    problems = [
        f"{what}: {', '.join(names[:SHOWN])}" + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        for what, names in (
            ("served but not given", sorted(served.keys() - sent.keys())),
            ("given but not served", sorted(sent.keys() - served.keys())),
            ("served with other bits than given", different),
        )
        if names
    ]
    if problems:
        raise PublishError(f"weight version {version} is not what the engine serves; " + "; ".join(problems))
