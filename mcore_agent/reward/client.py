"""Asks a model that judges: an OpenAI-compatible server over HTTP, or any object with ``ask``."""

import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, Protocol, runtime_checkable

from mcore_agent.protocols import InfraError
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.types import Message

MAX_BYTES = 16 << 20  # of an answer
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # HTTP states after which the same request may succeed
SETUP = frozenset({401, 403, 404})  # those that no episode is to blame for, and no retry mends


@dataclass(frozen=True)
class Reply:
    """An answer's text; ``first`` are the likeliest (token, log-probability) in the place of its first token, if asked for."""

    text: str
    first: tuple[tuple[str, float], ...] = ()


@runtime_checkable
class Chat(Protocol):
    """A model to ask. ``top``: how many likeliest first tokens to list; the answer then is one token long."""

    def ask(self, messages: Sequence[Message], top: int = 0) -> Reply: ...


@dataclass(frozen=True)
class HttpChat:
    """``POST {url}/chat/completions``, greedy unless ``temperature`` says otherwise; nothing is sent before the first ``ask``.

    ``key_env`` names an environment variable that holds the key, if one is needed. Proxies of the environment are not used.
    A request that fails in passing is sent again ``retries`` times, after ``pause_s``, then twice that, and so on.
    """

    url: str
    model: str
    key_env: str = ""
    timeout_s: float = 60.0
    retries: int = 3
    pause_s: float = 0.5
    max_tokens: int = 1024
    temperature: float = 0.0

    def __post_init__(self):
        if not self.url.startswith(("http://", "https://")):
            raise RewardError(f"url is {self.url!r}, but must start with http:// or https://, for example http://localhost:30000/v1")
        if not self.model:
            raise RewardError("model is empty, but must be the name under which the server at url knows it")
        for name, least in (("retries", 0), ("pause_s", 0), ("max_tokens", 1), ("temperature", 0)):
            if getattr(self, name) < least:
                raise RewardError(f"{name} is {getattr(self, name)}, but must be at least {least}")
        if self.timeout_s <= 0:
            raise RewardError(f"timeout_s is {self.timeout_s}, but must be above 0")

    @cached_property
    def _opener(self) -> urllib.request.OpenerDirector:  # made once: it reads the system's certificates, which takes a while
        return urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, messages: Sequence[Message], top: int = 0) -> Reply:
        """Raises InfraError when the server cannot be reached or answers garbage, RewardError when it knows no such model or key."""
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "temperature": self.temperature}
        body |= {"max_tokens": 1, "logprobs": True, "top_logprobs": top} if top else {"max_tokens": self.max_tokens}
        answer = self._post(json.dumps(body).encode())
        try:
            choice = json.loads(answer)["choices"][0]
            text = choice["message"]["content"] or ""
            listed = choice["logprobs"]["content"][0]["top_logprobs"] if top else []
            first = tuple((str(each["token"]), float(each["logprob"])) for each in listed)
        except (ValueError, LookupError, TypeError) as e:
            raise InfraError(f"{self.url} gave no chat completion: {answer[:200]!r}") from e
        return Reply(str(text), first)

    def _post(self, body: bytes) -> bytes:
        for attempt in range(self.retries + 1):
            try:
                return self._send(body)
            except urllib.error.HTTPError as e:
                said = f"{self.url} answered {e.code}: {e.read(200)!r}"
                if e.code in SETUP:
                    raise RewardError(f"{said}; check url, model and key_env") from e
                if e.code not in PASSING or attempt == self.retries:
                    raise InfraError(said) from e
            except (OSError, http.client.HTTPException) as e:
                if attempt == self.retries:
                    raise InfraError(f"{self.url} cannot be asked: {e!r}") from e
            time.sleep(self.pause_s * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _send(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.key_env:
            if self.key_env not in os.environ:
                raise RewardError(f"key_env is {self.key_env!r}, but there is no such environment variable")
            headers["Authorization"] = f"Bearer {os.environ[self.key_env]}"
        request = urllib.request.Request(self.url.rstrip("/") + "/chat/completions", body, headers)
        deadline = time.monotonic() + self.timeout_s
        parts, size = [], 0
        with self._opener.open(request, timeout=self.timeout_s) as response:
            while part := response.read1(1 << 16):  # piece by piece: a timeout of the socket alone lets a slow drip go on for ever
                parts.append(part)
                size += len(part)
                if time.monotonic() > deadline or size > MAX_BYTES:
                    raise TimeoutError(f"{size} bytes and no end within {self.timeout_s} s")
        return b"".join(parts)


class Remembering:
    """Asks each question once: the same messages get the same reply, also when they are asked at the same time."""

    def __init__(self, chat: Chat, size: int):
        self.chat, self.size = chat, size
        self._replies: OrderedDict[str, Future[Reply]] = OrderedDict()
        self._lock = Lock()

    def ask(self, messages: Sequence[Message], top: int = 0) -> Reply:
        """As the chat's own; a question that failed is asked anew next time."""
        if not self.size:
            return self.chat.ask(messages, top)
        key = hashlib.sha256(json.dumps([list(messages), top], sort_keys=True).encode()).hexdigest()
        with self._lock:
            found = self._replies.get(key)
            mine: Future[Reply] = Future()
            if found is None:
                self._replies[key] = mine
            if len(self._replies) > self.size:
                self._replies.popitem(last=False)
        if found is not None:
            return found.result()
        try:
            reply = self.chat.ask(messages, top)
        except BaseException as e:
            with self._lock:
                self._replies.pop(key, None)
            mine.set_exception(e)
            raise
        mine.set_result(reply)
        return reply


def chat_for(reward: str, url: str, model: str, options: Mapping[str, Any], client: Chat | None, remember: int) -> Remembering:
    """The client that was handed in, or one for ``url``. Raises RewardError unless there is exactly one of them."""
    if (client is None) == (not url):
        raise RewardError(f"reward {reward!r}: give url and model of a server, or a client, and not both")
    if remember < 0:
        raise RewardError(f"reward {reward!r}: remember is {remember}, but must be at least 0")
    if client is not None:
        return Remembering(client, remember)
    try:
        return Remembering(HttpChat(url, model, **options), remember)
    except (RewardError, TypeError) as e:
        raise RewardError(f"reward {reward!r}: {e}") from e
