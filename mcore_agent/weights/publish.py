"""Giving an engine the new weights, and not believing it before it shows the same bits (I9)."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from ckpt_convert.checksum import tensor_checksum
from mcore_agent.protocols import Engine

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


async def publish(engine: Engine, tensors: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int = BUCKET_BYTES) -> PublishReport:
    """Sends all tensors in buckets of at most ``bucket_bytes`` (or one tensor), then compares checksums name by name.

    ``tensors`` is exhausted in any case, because other ranks take part in making it, and an update that was begun
    is ended. Raises PublishError when a name is missing, unknown or given twice, or when bits differ.
    """
    start = time.monotonic()
    sent: dict[str, str] = {}
    stream = iter(tensors)
    size = 0
    try:
        await engine.begin_update()
        for bucket in _buckets(stream, bucket_bytes):
            for name, tensor in bucket:
                if name in sent:
                    raise PublishError(f"{name} was exported twice")
                sent[name] = tensor_checksum(tensor)
                size += tensor.nbytes
            await engine.update(bucket)
        await engine.end_update(version)
    except (ValueError, RuntimeError) as e:
        for _ in stream:
            pass
        await _close(engine, version)
        raise PublishError(f"weight version {version} was not published after {len(sent)} tensors: {e}") from e
    compared = time.monotonic()
    _compare(sent, await engine.checksum(), version)
    if engine.version != version:
        raise PublishError(f"the engine serves version {engine.version} after version {version} was published")
    end = time.monotonic()
    return PublishReport(version, len(sent), size, end - start, end - compared)


async def _close(engine: Engine, version: int) -> None:
    """Ends an update that failed. The engine refuses it, as it must; that it is over is what counts."""
    try:
        await engine.end_update(version)
    except (ValueError, RuntimeError):
        return


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
