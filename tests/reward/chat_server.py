"""A real HTTP server in a thread that speaks as much of the OpenAI API as judges need; a test says what it answers."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web


class ChatServer:
    """``answer(body)`` gives a text, a list of (token, log-probability), a ready ``web.Response`` or an awaitable of one."""

    def __init__(self, answer: Callable[[dict], Any]):
        self.answer = answer
        self.asked: list[dict] = []  # bodies, as they came
        self.keys: list[str] = []  # what each said in Authorization
        self.now = self.most = 0  # requests under way, and the most there were at once
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            found = self.answer(body)
            found = await found if asyncio.iscoroutine(found) else found
        finally:
            self.now -= 1
        if isinstance(found, web.StreamResponse):
            return found
        choice: dict = {"message": {"role": "assistant", "content": found if isinstance(found, str) else found[0][0]}}
        if not isinstance(found, str):
            choice["logprobs"] = {"content": [{"top_logprobs": [{"token": t, "logprob": p} for t, p in found]}]}
        return web.json_response({"choices": [choice]})


@contextmanager
def serving(answer: Callable[[dict], Any]) -> Iterator[ChatServer]:
    server, loop = ChatServer(answer), asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
