"""From messages to token ids, once. What the engine has seen is only ever appended to.

The text between an assistant turn and the next generation prompt is derived from the chat template itself: a dialog
is rendered with a marker in the assistant's place, and what follows the marker is that text (defect C1).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mcore_agent.types import Message

MARK = "@@TURN@@"
PROBE_PROMPT: Message = {"role": "user", "content": "q1"}
PROBE_TURNS = ("a1", "<think>\nwhy\n</think>\n\na2")


class RenderError(ValueError):
    """A template or a message that cannot be rendered by appending: the message says where it breaks."""


class ChatRenderer:
    """Renders with ``tokenizer``'s chat template, which is given ``tools``.

    ``roles`` are the roles of observations (default: ``tool`` when there are tools, else none). ``stop`` holds the
    tokens that end an assistant turn, derived from the template. Raises RenderError when the template does not end
    an assistant turn with a special token, or when for one of the roles a later message changes an earlier part.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = (), roles: Sequence[str] | None = None):
        self.tokenizer = tokenizer
        self.tools = [dict(tool) for tool in tools] or None
        self.roles = tuple(roles) if roles is not None else ("tool",) if self.tools else ()
        added = tokenizer.added_tokens_decoder
        self._special = sorted({t.content for t in added.values() if t.special}, key=lambda s: (-len(s), s))
        # The turn's end, seen from the last message of a dialog and from each kind of message that may follow.
        tails = [self._tail([{"role": role, "content": "o1"}], prompt=True) for role in self.roles]
        last = self._tail([], prompt=False) or self._tail([PROBE_PROMPT], prompt=True)
        ends = [self._first_special(tail, added) for tail in (last, *tails)]
        self.end, self.stop = ends[0], tuple(dict.fromkeys(ends))
        for role in self.roles:
            for turn in PROBE_TURNS:
                self._check_append_only(role, turn)

    # ------------------------------------------------------------------------------------------- for rollouts

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """[P] ids of the dialog so far and the generation prompt."""
        return self._encode(self.text(messages, prompt=True))

    def observation(self, messages: Sequence[Message], last: int) -> np.ndarray:
        """[O] ids that follow an assistant turn whose final id is ``last``: the messages and the generation prompt.

        The template's end of the turn is left out when ``last`` is that token: the policy has sampled it itself (C3).
        """
        ids = self._encode(self._tail(messages, prompt=True))
        return ids[1:] if ids[0] == last else ids

    def reply(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of an assistant turn without its end token; tags stay."""
        ids = [int(i) for i in ids]
        if ids and ids[-1] in self.stop:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # ------------------------------------------------------------------------------------- for demonstrations

    def demo(self, messages: Sequence[Message], prompt: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The ids [T] of a rollout of this dialog, and a mask [T] of assistant texts with their end tokens.

        ``prompt`` is the number of leading messages that are the prompt (default: all before the first assistant's).
        Raises RenderError when the rest does not start and end with an assistant message, or when one of these
        contains a token that ends a turn.
        """
        roles = [message["role"] for message in messages]
        if prompt is None:
            prompt = roles.index("assistant") if "assistant" in roles else len(roles)
        turns = [i for i in range(prompt, len(roles)) if roles[i] == "assistant"]
        if not turns or turns[0] != prompt or turns[-1] != len(roles) - 1:
            raise RenderError(f"after its prompt a demonstration must start and end with an assistant message; roles: {roles}")
        parts, trained = [self.prompt(messages[:prompt])], [False]
        for at, following in zip(turns, [*turns[1:], None], strict=True):
            text = self._encode(messages[at]["content"])
            if np.isin(text, self.stop).any():
                raise RenderError(f"assistant message {at} of a demonstration contains a token that ends a turn")
            if following is None:
                parts, trained = [*parts, np.append(text, self.end)], [*trained, True]
                break
            tail = self._encode(self._tail(messages[at + 1 : following], prompt=True))
            parts, trained = [*parts, np.append(text, tail[0]), tail[1:]], [*trained, True, False]
        return np.concatenate(parts), np.repeat(trained, [len(part) for part in parts])

    # --------------------------------------------------------------------------------------------- the template

    def text(self, messages: Sequence[Message], prompt: bool) -> str:
        """The template's text of a whole dialog, with or without the generation prompt. Raises RenderError."""
        from jinja2.exceptions import TemplateError

        safe = [self._defuse(message) for message in messages]
        try:
            return self.tokenizer.apply_chat_template(safe, tools=self.tools, tokenize=False, add_generation_prompt=prompt)
        except TemplateError as e:
            roles = [message["role"] for message in messages]
            raise RenderError(f"the chat template refuses a dialog of roles {roles}: {e}; use another template") from e

    def _defuse(self, message: Message) -> Message:
        """Breaks up special tokens in text that is data: an observation must not be able to open an assistant turn."""
        content = message["content"]
        if not isinstance(content, str):
            raise RenderError(f"the content of a {message['role']} message is {type(content).__name__}, not text")
        content = content.encode(errors="replace").decode()  # lone surrogates cannot be tokenized
        if message["role"] != "assistant":
            for token in self._special:
                content = content.replace(token, f"{token[0]} {token[1:]}")
        return {**message, "content": content}

    def _tail(self, messages: Sequence[Message], prompt: bool) -> str:
        dialog = [PROBE_PROMPT, {"role": "assistant", "content": MARK}, *messages]
        _, mark, tail = self.text(dialog, prompt).partition(MARK)
        if not mark:
            raise RenderError("the chat template changes the text of an assistant turn; use a template that keeps it")
        return tail

    def _first_special(self, tail: str, added: Mapping[int, Any]) -> int:
        ids = self._encode(tail)
        if not len(ids) or int(ids[0]) not in added:
            raise RenderError(
                f"the chat template does not end an assistant turn with a special token (it goes on {tail[:20]!r}); "
                "use a template that does, for example ChatML"
            )
        return int(ids[0])

    def _check_append_only(self, role: str, turn: str) -> None:
        """Two turns appended piece by piece must be the whole dialog rendered at once, as text and as ids."""
        obs: Message = {"role": role, "content": "o1"}
        replies = [{"role": "assistant", "content": turn}, {"role": "assistant", "content": "a3"}]
        whole = self.text([PROBE_PROMPT, replies[0], obs, replies[1], obs], prompt=True)
        tail = self._tail([obs], prompt=True)
        pieces = self.text([PROBE_PROMPT], prompt=True) + turn + tail + "a3" + tail
        if pieces != whole:
            at = next((i for i, (a, b) in enumerate(zip(pieces, whole, strict=False)) if a != b), min(len(pieces), len(whole)))
            raise RenderError(
                f"the chat template is not append-only for observations of role {role!r}: appended {pieces[at : at + 30]!r}, "
                f"rendered {whole[at : at + 30]!r} at character {at}. Use a template that keeps earlier turns as they are"
            )
        end = self._encode(tail)[:1]
        ids = [self.prompt([PROBE_PROMPT])]
        for text in (turn, "a3"):
            ids += [self._encode(text), end, self.observation([obs], int(end[0]))]
        if not np.array_equal(np.concatenate(ids), self._encode(whole)):
            raise RenderError(f"the tokenizer joins tokens across a turn's end for role {role!r}; use another tokenizer")

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
