"""Reads a Hugging Face config strictly: a key is used, known to be neutral, or refused.

A feature that the converter does not know would give silently wrong weights (defect E25), so a switched-on
key without a rule is an error, never a warning.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_convert.errors import ConvertError

REQUIRED = object()

# Keys that say nothing about the weights or the forward pass of a causal language model.
NEUTRAL = frozenset({
    "architectures", "model_type", "_name_or_path", "name_or_path", "transformers_version", "transformers.js_config",
    "torch_dtype", "dtype", "use_cache", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id", "is_llama_config",
    "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "output_attentions",
    "output_hidden_states", "output_router_logits", "router_aux_loss_coef", "return_dict", "id2label", "label2id",
    "problem_type", "chunk_size_feed_forward", "max_window_layers",
})  # fmt: skip


@dataclass(frozen=True)
class Arch:
    """The facts of a decoder. Sizes are counts of elements; ``experts`` is 0 in a dense model."""

    layers: int
    hidden: int
    heads: int
    groups: int  # key-value heads
    head_dim: int
    ffn: int  # intermediate size of a dense layer
    vocab: int  # without padding
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    init_std: float
    qk_norm: bool = False
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    norm_topk: bool = False  # routing weights are renormalized over the chosen experts


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConvertError when it is missing or is not one."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConvertError(f"{path} is missing; give a folder that holds it") from None
    except ValueError as e:
        raise ConvertError(f"{path} is not JSON ({e}); fetch or write it again") from None
    if not isinstance(content, dict):
        raise ConvertError(f"{path} holds no JSON object; fetch or write it again")
    return content


class Reader:
    """Takes keys out of a config; ``done`` refuses what is left over and switched on."""

    def __init__(self, config: Mapping[str, Any], family: str):
        self.family = family
        self.left = {k: v for k, v in config.items() if k not in NEUTRAL}

    def refusal(self, key: str, value: Any, reason: str) -> ConvertError:
        return ConvertError(
            f"config.json: {key} is {value!r}: {reason}. Use a checkpoint without it, "
            f"or add the rule to ckpt_convert/families/{self.family}.py"
        )

    def take(self, key: str, default: Any = REQUIRED) -> Any:
        """The value, or ``default`` when the key is missing or null. Raises ConvertError when a required one is missing."""
        value = self.left.pop(key, None)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ConvertError(f"config.json: {key} is missing and {self.family} has no default for it; write it there")
        return default

    def size(self, key: str, default: Any = REQUIRED) -> int:
        value = self.take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConvertError(f"config.json: {key} is {value!r}, but must be a positive integer; correct config.json")
        return value

    def only(self, key: str, allowed: tuple[Any, ...], reason: str) -> None:
        """Refuses any value but the allowed ones; the first is the default."""
        value = self.take(key, allowed[0])
        if value not in allowed:
            raise self.refusal(key, value, reason)

    def rope_theta(self) -> float:
        """``rope_parameters`` of transformers 5, or ``rope_theta`` and ``rope_scaling`` of older releases."""
        old_theta, scaling = self.take("rope_theta", None), self.take("rope_scaling", None)
        new = self.take("rope_parameters", None)
        if new and scaling:
            raise self.refusal("rope_scaling", scaling, "rope_parameters are given as well; keep one of them")
        rope = dict(new or scaling or {})
        kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
        theta = rope.pop("rope_theta", old_theta)
        if kind != "default" or any(v is not None for v in rope.values()):
            raise self.refusal("rope_parameters", {"rope_type": kind, **rope}, "only unscaled rotary embeddings have a rule")
        if old_theta is not None and theta != old_theta:
            raise ConvertError(f"config.json: rope_theta is {old_theta} but rope_parameters say {theta}; make them agree")
        return float(10000.0 if theta is None else theta)

    def done(self) -> None:
        for key, value in self.left.items():
            if value:
                raise self.refusal(key, value, f"no rule of {self.family} knows this key")


def read_arch(r: Reader, ffn: int, head_dim: int | None = None, **more: Any) -> Arch:
    """The facts that all families share, and ``more`` of the caller's; then no key may be left over.

    ``head_dim`` is the family's default, None: hidden size / heads. Raises ConvertError.
    """
    hidden, heads = r.size("hidden_size"), r.size("num_attention_heads")
    layers = r.size("num_hidden_layers")
    groups = r.size("num_key_value_heads", heads)
    if heads % groups:
        raise ConvertError(f"config.json: num_key_value_heads={groups} does not divide num_attention_heads={heads}; correct it")
    r.only("hidden_act", ("silu",), "only SiLU-gated layers have a rule")
    r.only("attention_bias", (False,), "attention biases have no rule")
    r.only("mlp_bias", (False,), "biases have no rule")
    r.only("attention_dropout", (0.0,), "the learner trains without dropout")
    windows = r.take("use_sliding_window", False)
    if windows:
        raise r.refusal("use_sliding_window", windows, "sliding-window attention has no rule")
    r.take("sliding_window", None)  # without use_sliding_window it has no effect in these families
    kinds = set(r.take("layer_types", ("full_attention",)))
    if kinds != {"full_attention"}:
        raise r.refusal("layer_types", sorted(kinds), "only full attention has a rule")
    arch = Arch(
        layers=layers,
        hidden=hidden,
        heads=heads,
        groups=groups,
        head_dim=r.size("head_dim", head_dim or hidden // heads),
        ffn=ffn,
        vocab=r.size("vocab_size"),
        norm_eps=float(r.take("rms_norm_eps", 1e-6)),
        rope_theta=r.rope_theta(),
        max_positions=r.size("max_position_embeddings", 2048),
        tied=bool(r.take("tie_word_embeddings", False)),
        init_std=float(r.take("initializer_range", 0.02)),
        **more,
    )
    r.done()
    return arch
