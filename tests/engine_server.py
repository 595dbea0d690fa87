"""A server that plays an engine, for fault injection: token ids over a socket, one JSON line each way, standard library only.

The next token depends on all tokens so far (and, when sampling, on the seed), so that a request that goes on elsewhere
gives what it would have given. It ends when its standard input closes: its parent is gone.
"""

import asyncio
import json
import os
import sys
from typing import Any
from zlib import crc32

VOCAB = 997


def next_token(tokens: list[int], seed: int, temperature: float, state: int) -> tuple[int, int]:
    """The token after ``tokens``; ``state`` is what was returned for all of them but the last."""
    state = crc32(tokens[-1].to_bytes(4, "little"), state)
    drawn = crc32(seed.to_bytes(8, "little"), state) if temperature else state
    return drawn * 2654435761 % 2**32 % VOCAB, state


class Server:
    """``vocab``: tokens are below it. ``stop_every`` n: every n-th token, or so, is the request's first stop token."""

    def __init__(self, delay: float, version: int, vocab: int = VOCAB, stop_every: int = 0):
        self.delay, self.version, self.vocab, self.stop_every = delay, version, vocab, stop_every
        self.progress, self.garbage, self.mute = 0, False, False
        self.paused, self.asleep, self.names, self.updating = False, set(), [], False
        self.live: dict[str, bool] = {}  # id -> not aborted
        self.last: dict[str, list[int]] = {}  # session -> what is cached of it

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = json.loads(await reader.readline())
            gone = asyncio.ensure_future(reader.read(1))  # ends when the client hangs up
            call = asked.pop("call")
            answer = await getattr(self, "do_" + call)(gone=gone, **asked)
            gone.cancel()
            line = b'{"tokens": [1, 2' if self.garbage and call == "generate" else json.dumps(answer).encode()
            writer.write(line + b"\n")
            await writer.drain()
        except (ConnectionError, json.JSONDecodeError):
            pass
        finally:
            writer.close()

    async def do_generate(self, gone, id, tokens, max_new, stop, seed, temperature, session) -> dict:
        if self.asleep or (self.updating and not self.paused):
            return {"refused": f"generate while {sorted(self.asleep) or 'an update'} is under way"}
        done: dict = {"tokens": [], "logp": [], "version": [], "finish": "abort", "cached": 0}
        before = self.last.get(session, [])
        while done["cached"] < min(len(before), len(tokens) - 1) and before[done["cached"]] == tokens[done["cached"]]:
            done["cached"] += 1
        row, state = list(tokens), 0
        for token in tokens[:-1]:
            state = crc32(token.to_bytes(4, "little"), state)
        self.live[id] = True
        while self.live[id] and not gone.done():
            await asyncio.sleep(self.delay)
            if self.paused or self.mute or not self.live[id]:
                continue
            token, state = next_token(row, seed, temperature, state)
            token = stop[0] if self.stop_every and stop and token % self.stop_every == 0 else token % self.vocab
            row.append(token)
            self.progress += 1
            done["tokens"].append(token)
            done["logp"].append(-(1 + state % 991) / 100)
            done["version"].append(self.version)
            if token in stop or len(done["tokens"]) == max_new:
                done["finish"] = "stop" if token in stop else "length"
                break
        del self.live[id]
        if session:
            self.last[session] = row
        return done

    async def do_abort(self, gone, ids) -> dict:
        for name in self.live if ids is None else ids:
            if name in self.live:
                self.live[name] = False
        return {}

    async def do_pause(self, gone, mode) -> dict:
        self.paused = True
        return await self.do_abort(gone, None) if mode == "abort" else {}

    async def do_resume(self, gone) -> dict:
        self.paused = False
        return {}

    async def do_sleep(self, gone, tags) -> dict:
        if self.live:
            return {"refused": f"sleep while {len(self.live)} requests are in flight"}
        self.last.clear()
        self.asleep |= set(tags)
        return {}

    async def do_wake(self, gone, tags) -> dict:
        self.asleep -= set(tags)
        return {}

    async def do_begin(self, gone) -> dict:
        if self.live and not self.paused:
            return {"refused": "begin_update while requests are in flight; pause first"}
        self.updating, self.names = True, []
        return {}

    async def do_update(self, gone, names) -> dict:
        if not self.updating:
            return {"refused": "update outside begin_update and end_update"}
        self.names += names
        return {}

    async def do_end(self, gone, version) -> dict:
        if not self.updating:
            return {"refused": "end_update outside an update; begin one first"}
        self.updating, self.version = False, version
        self.last.clear()
        return {"twice": sorted({n for n in self.names if self.names.count(n) > 1})}

    async def do_flush(self, gone) -> dict:
        self.last.clear()
        return {}

    async def do_look(self, gone) -> dict:
        return {"progress": self.progress, "version": self.version, "live": len(self.live), "asleep": sorted(self.asleep)}

    async def do_set(self, gone, **values) -> dict:
        """``garbage``: every later answer to a request is. ``mute``: it makes no token, but says so. ``delay``: seconds a token."""
        for name, value in values.items():
            setattr(self, name, value)
        return {}


async def main(*settings: Any) -> None:
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lambda: os._exit(0))
    server = Server(*settings)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, limit=1 << 24, backlog=1024)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), *map(int, sys.argv[2:])))
