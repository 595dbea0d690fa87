"""What goes over the line: a request as JSON, an answer as a Completion, and the state that a server keeps in its version."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mcore_agent.protocols import Completion, EngineDown, Request

SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class Served:
    """The weight version of a server, and what keeps it from serving. As text it is the server's own ``weight_version``.

    >>> Served(3, asleep=frozenset({"kv_cache"})).text(), Served.parse("4").serves
    ('3;asleep=kv_cache', True)
    """

    version: int = -1
    ready: bool = True  # it has complete weights
    updating: bool = False
    asleep: frozenset[str] = frozenset()

    @property
    def serves(self) -> bool:
        return self.ready and not self.updating and not self.asleep

    def text(self) -> str:
        parts = [str(self.version)]
        parts += ["empty"] if not self.ready else []
        parts += ["updating"] if self.updating else []
        parts += ["asleep=" + ",".join(sorted(self.asleep))] if self.asleep else []
        return ";".join(parts)

    @staticmethod
    def parse(text: str) -> "Served":
        """Raises EngineDown for a version that no engine of ours wrote."""
        head, *rest = text.split(";")
        out = Served()
        try:
            out = replace(out, version=int(head))
        except ValueError as e:
            raise EngineDown(f"the server has weight version {text!r}, which is no number: another program changed it") from e
        for part in rest:
            if part.startswith("asleep="):
                out = replace(out, asleep=frozenset(part.removeprefix("asleep=").split(",")))
            else:
                out = replace(out, ready=out.ready and part != "empty", updating=out.updating or part == "updating")
        return out


def body_of(r: Request, rid: str, seeded: bool) -> dict[str, Any]:
    """The JSON of ``/generate``."""
    sampling: dict[str, Any] = {
        "max_new_tokens": int(r.max_new),
        "temperature": float(r.temperature),
        "top_p": float(r.top_p),
        "top_k": int(r.top_k) if r.top_k else -1,
        "stop_token_ids": [int(t) for t in r.stop],
    }
    if seeded:
        sampling["sampling_seed"] = r.seed & SEED_MASK
    body = {"rid": rid, "input_ids": np.asarray(r.tokens).tolist(), "sampling_params": sampling}
    body |= {"return_logprob": True, "logprob_start_len": -1, "stream": False}
    if r.routing:
        body["return_routed_experts"] = True
    return body


@dataclass(frozen=True)
class Experts:
    """How expert choices are laid out: SGLang reports every layer, a Completion those that have experts."""

    layers: int
    moe: tuple[int, ...]  # the layers that have experts
    top_k: int

    @staticmethod
    def of(config: Any) -> "Experts | None":
        """From a transformers config; None for a dense model."""
        fields = config.to_dict()
        count = fields.get("num_experts") or fields.get("n_routed_experts") or fields.get("num_local_experts")
        if not count:
            return None
        layers = int(fields["num_hidden_layers"])
        dense = set(fields.get("mlp_only_layers") or ())
        step, first = int(fields.get("decoder_sparse_step") or 1), int(fields.get("first_k_dense_replace") or 0)
        moe = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0 and i >= first)
        return Experts(layers, moe, int(fields["num_experts_per_tok"]))

    def read(self, text: Any, rows: int) -> np.ndarray:
        """[rows, moe layers, top_k] int32 from base64. Raises EngineDown unless there is a row for every token that was read."""
        try:
            flat = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.int32)
        except (binascii.Error, TypeError, ValueError) as e:
            raise EngineDown(f"the server's routed experts cannot be read: {e}") from e
        if flat.size != rows * self.layers * self.top_k:
            raise EngineDown(
                f"the server reports {flat.size} expert choices, but {rows} tokens in {self.layers} layers make "
                f"{rows * self.layers * self.top_k}"
            )
        return flat.reshape(rows, self.layers, self.top_k)[:, list(self.moe)].copy()


def failed(reason: str) -> Completion:
    """A request that ends without tokens, as ``error``."""
    return Completion(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.int32), "error", error=reason)


def aborted() -> Completion:
    """A request that ends without tokens, as ``abort``."""
    return Completion(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort")


def completion_of(r: Request, answer: Any, experts: Experts | None) -> Completion:
    """Raises EngineDown for an answer that lacks what it must have, or contradicts itself.

    A log-probability is that of the sampled token, whatever else the server lists beside it.
    """
    try:
        ids, meta = answer["output_ids"], answer["meta_info"]
        reason = meta["finish_reason"]
        pairs = meta["output_token_logprobs"]
        spans = meta["weight_versions"]
        kind = reason["type"]
    except (KeyError, TypeError) as e:
        raise EngineDown(f"the server's answer to request {r.id!r} lacks {e}: {str(answer)[:200]}") from e
    if kind == "abort" and reason.get("status_code"):
        return failed(str(reason.get("message", "the server ended the request")))
    if len(pairs) != len(ids) or any(pair[1] != token for pair, token in zip(pairs, ids, strict=True)):
        raise EngineDown(f"the server's answer to request {r.id!r} has {len(ids)} tokens, but log-probabilities of {len(pairs)} others")
    if any(pair[0] is None for pair in pairs):
        return failed("logits are not finite: the weights that are served have diverged")
    tokens = np.array(ids, dtype=np.int64)
    if kind not in ("stop", "length", "abort") or (kind == "stop" and (not ids or ids[-1] not in r.stop)):
        raise EngineDown(f"the server's answer to request {r.id!r} ends by {reason}, which was not asked for")
    routing = None
    if r.routing and len(ids):
        assert experts is not None
        routing = experts.read(meta.get("routed_experts"), len(r.tokens) + len(ids) - 1)
    logp = np.array([pair[0] for pair in pairs], dtype=np.float32)
    return Completion(tokens, logp, _versions(r, spans, len(ids)), kind, int(meta.get("cached_tokens") or 0), routing=routing)


def _versions(r: Request, spans: list[Mapping[str, Any]], count: int) -> np.ndarray:
    """[count] int32: the version that drew each token."""
    out = np.full(count, -1, dtype=np.int32)
    for span in spans:
        if span["end"] > span["start"]:
            served = Served.parse(span["version"])
            if not served.serves:
                raise EngineDown(f"the server answered request {r.id!r} while its weights were incomplete ({span['version']})")
            out[span["start"] : span["end"]] = served.version
    if (out < 0).any():
        raise EngineDown(f"the server's answer to request {r.id!r} leaves {int((out < 0).sum())} tokens without a weight version")
    return out



@dataclass
class Work:
    """How far a scheduler is, from its entries of ``/v1/loads``.

    SGLang counts prompt and sampled tokens, but leaves out decoding steps that take long; that its load changed tells of those.
    """

    changes: int = 0
    last: Any = None

    def seen(self, loads: list[Mapping[str, Any]]) -> int:
        """A number that grows as long as there is progress."""
        now = [(load["total_prefill_uncached_tokens"], load["num_total_tokens"], load.get("decode_moments")) for load in loads]
        self.changes += now != self.last
        self.last = now
        return self.changes + sum(int(prefilled + (moments[5] if moments else 0)) for prefilled, _, moments in now)
