"""What all families share: the Family record, and the rules for the parts of a decoder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ckpt_convert.errors import ConvertError
from ckpt_convert.hfconfig import Arch
from ckpt_convert.ops import Columns, Copy, Op, Qkv, Rows, Vocabulary

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
HF_EMBEDDING, HF_OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Param:
    """One Megatron parameter, by its global name, and the Hugging Face tensors it is made of.

    The global name counts layers and experts over the whole model:
    ``decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight`` is expert 5 of layer 3 on whatever rank.
    """

    name: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the Hugging Face tensors, aligned with hf
    op: Op
    layer: int | None = None
    expert: int | None = None

    @property
    def tp_dim(self) -> int | None:
        """The dimension that tensor parallelism splits (expert tensor parallelism for an expert), None: replicated."""
        return self.op.split


@dataclass(frozen=True)
class Family:
    """All correspondences of one model. ``tp`` of an expert parameter is the expert tensor parallel size.

    >>> from ckpt_convert.families import family_of
    >>> f = family_of({"model_type": "llama", "hidden_size": 6, "num_attention_heads": 3, "num_hidden_layers": 1,
    ...                "intermediate_size": 5, "vocab_size": 7, "tie_word_embeddings": True})
    >>> f.param("decoder.layers.0.mlp.linear_fc1.weight").hf
    ('model.layers.0.mlp.gate_proj.weight', 'model.layers.0.mlp.up_proj.weight')
    >>> f.param("output_layer.weight").hf  # tied: the last pipeline stage's copy of the embedding
    ('model.embed_tokens.weight',)
    """

    model_type: str
    arch: Arch
    params: tuple[Param, ...]

    @cached_property
    def _by_name(self) -> dict[str, Param]:
        table = {p.name: p for p in self.params}
        if self.arch.tied:
            table[OUTPUT] = table[EMBEDDING]
        return table

    def names(self) -> list[str]:
        """All Hugging Face tensor names that the config implies (tied: without ``lm_head.weight``)."""
        return list(self.shapes())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape."""
        return dict(self._shapes)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for p in self.params for name, shape in zip(p.hf, p.shapes, strict=True)}

    def duplicates(self) -> dict[str, str]:
        """Names that a checkpoint may store besides, each a bit-equal copy of another: the head of a tied model."""
        return {HF_OUTPUT: HF_EMBEDDING} if self.arch.tied else {}

    def globals(self) -> list[Param]:
        """Every Megatron parameter once (tied: without the last stage's copy of the embedding)."""
        return list(self.params)

    def param(self, name: str) -> Param:
        """The rule of a global Megatron name. Raises ConvertError when there is none."""
        if name not in self._by_name:
            raise ConvertError(f"Megatron parameter {name} has no rule in family {self.model_type}")
        return self._by_name[name]

    def to_mcore(self, name: str, get: Callable[[str], Tensor], tp: int, tp_rank: int) -> Tensor:
        """The shard of ``tp_rank`` of a Megatron parameter; ``get`` reads Hugging Face tensors by name.

        May be a view of what ``get`` returned. Raises ConvertError on a wrong shape or a ``tp`` that does not divide.
        """
        p = self.param(name)
        sources = [get(hf) for hf in p.hf]
        for hf, shape, t in zip(p.hf, p.shapes, sources, strict=True):
            if tuple(t.shape) != shape:
                raise ConvertError(f"tensor {hf} has shape {tuple(t.shape)}, but the config implies {shape}")
        return p.op.shard(sources, tp, tp_rank)

    def to_hf(self, name: str, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        """The Hugging Face tensors of a Megatron parameter from the shards of all tensor parallel ranks, in rank order.

        The bit-exact inverse of ``to_mcore``. Raises ConvertError when the shards do not make up the shapes of the config.
        """
        p = self.param(name)
        out = dict(zip(p.hf, p.op.whole(shards), strict=True))
        for hf, shape in zip(p.hf, p.shapes, strict=True):
            if tuple(out[hf].shape) != shape:
                made = tuple(out[hf].shape)
                raise ConvertError(f"{len(shards)} shards of {name} make {hf} {made}, but the config implies {shape}")
        return out

    def check_layout(self, tp: int = 1, pp: int = 1, ep: int = 1, vpp: int = 1, etp: int = 1) -> None:
        """Raises ConvertError, naming the nearest legal values, when the model cannot be split so.

        A stage of ``pp`` has ``vpp`` parts of the layers; ``etp`` counts only where there are experts.
        """
        a = self.arch
        splits = [
            ("tp", tp, "num_key_value_heads", a.groups),
            ("tp", tp, "num_attention_heads", a.heads),
            ("etp", etp, "moe_intermediate_size", a.expert_ffn) if a.experts else ("tp", tp, "intermediate_size", a.ffn),
            ("pp", pp, "num_hidden_layers", a.layers),
            ("ep", ep, "number of experts", a.experts or 1),
        ]
        if pp > 0 and a.layers % pp == 0:
            splits.append(("vpp", vpp, f"layers of a stage of pp={pp}", a.layers // pp))
        for key, value, what, size in splits:
            if value < 1 or size % value:
                ways = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
                raise ConvertError(f"{key}={value} does not divide the model's {what} ({size}); use one of {ways}")

    def transformer_kwargs(self) -> dict[str, Any]:
        """Fields of Megatron's TransformerConfig that the Hugging Face config decides. The activation is SiLU."""
        a = self.arch
        facts: dict[str, Any] = {
            "num_layers": a.layers,
            "hidden_size": a.hidden,
            "ffn_hidden_size": a.ffn,
            "num_attention_heads": a.heads,
            "num_query_groups": a.groups,
            "kv_channels": a.head_dim,
            "normalization": "RMSNorm",
            "layernorm_epsilon": a.norm_eps,
            "qk_layernorm": a.qk_norm,
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "init_method_std": a.init_std,
        }
        if a.experts:
            facts |= {
                "num_moe_experts": a.experts,
                "moe_router_topk": a.topk,
                "moe_ffn_hidden_size": a.expert_ffn,
                # softmax over the chosen logits equals softmax over all, then renormalized
                "moe_router_pre_softmax": not a.norm_topk,
                "moe_router_score_function": "softmax",
            }
        return facts

    def model_kwargs(self) -> dict[str, Any]:
        """Arguments of Megatron's GPTModel, except that ``vocab_size`` still has to be padded (``ops.padded_vocabulary``)."""
        a = self.arch
        return {
            "vocab_size": a.vocab,
            "max_sequence_length": a.max_positions,
            "position_embedding_type": "rope",
            "rotary_base": a.rope_theta,
            "share_embeddings_and_output_weights": a.tied,
        }


def decoder(model_type: str, a: Arch, layer: Callable[[Arch, int], list[Param]]) -> Family:
    """A family from the rules of one layer: embedding, layers, final norm, and the head unless it is tied."""
    table = (a.vocab, a.hidden)
    params = [Param(EMBEDDING, (HF_EMBEDDING,), (table,), Vocabulary(a.vocab))]
    params += [p for i in range(a.layers) for p in layer(a, i)]
    params.append(Param("decoder.final_layernorm.weight", ("model.norm.weight",), ((a.hidden,),), Copy()))
    if not a.tied:
        params.append(Param(OUTPUT, (HF_OUTPUT,), (table,), Vocabulary(a.vocab)))
    return Family(model_type, a, tuple(params))


def _rule(i: int, mcore: str, hf: Sequence[str], shapes: Sequence[tuple[int, ...]], op: Op, expert: int | None = None) -> Param:
    names = tuple(f"model.layers.{i}.{n}.weight" for n in hf)
    return Param(f"decoder.layers.{i}.{mcore}.weight", names, tuple(shapes), op, i, expert)


def attention(a: Arch, i: int) -> list[Param]:
    """Norm, fused query-key-value, query and key norms where the family has them, output projection."""
    h, d = a.hidden, a.head_dim
    hf = [f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj")]
    rules = [
        _rule(i, "input_layernorm", ["input_layernorm"], [(h,)], Copy()),
        _rule(i, "self_attention.linear_qkv", hf, [(a.heads * d, h), (a.groups * d, h), (a.groups * d, h)], Qkv(a.groups, d)),
        _rule(i, "self_attention.linear_proj", ["self_attn.o_proj"], [(h, a.heads * d)], Columns()),
        _rule(i, "pre_mlp_layernorm", ["post_attention_layernorm"], [(h,)], Copy()),
    ]
    if a.qk_norm:
        rules += [_rule(i, f"self_attention.{x}_layernorm", [f"self_attn.{x}_norm"], [(d,)], Copy()) for x in "qk"]
    return rules


def gated_mlp(a: Arch, i: int) -> list[Param]:
    """A dense SiLU-gated layer."""
    return _gated(i, "mlp", "mlp", a.hidden, a.ffn)


def experts(a: Arch, i: int) -> list[Param]:
    """A router and ``a.experts`` gated layers."""
    rules = [_rule(i, "mlp.router", ["mlp.gate"], [(a.experts, a.hidden)], Copy())]
    for e in range(a.experts):
        rules += _gated(i, f"mlp.experts.local_experts.{e}", f"mlp.experts.{e}", a.hidden, a.expert_ffn, e)
    return rules


def _gated(i: int, mcore: str, hf: str, hidden: int, ffn: int, expert: int | None = None) -> list[Param]:
    merged = [f"{hf}.gate_proj", f"{hf}.up_proj"]
    return [
        _rule(i, f"{mcore}.linear_fc1", merged, [(ffn, hidden), (ffn, hidden)], Rows(2), expert),
        _rule(i, f"{mcore}.linear_fc2", [f"{hf}.down_proj"], [(hidden, ffn)], Columns(), expert),
    ]
