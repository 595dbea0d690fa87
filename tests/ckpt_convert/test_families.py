"""Every family's rules, played both ways on random tensors of sizes that are not square and not powers of two."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_convert import ConvertError
from ckpt_convert.families import Family, family_of, model_types
from ckpt_convert.hfconfig import NEUTRAL
from ckpt_convert.ops import padded_vocabulary
from ckpt_convert.source import DictSource, RandomSource, check_source

TINY = {
    "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 10,
    "intermediate_size": 42, "vocab_size": 67,
}  # fmt: skip
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 18, "norm_topk_prob": True}


def config(kind: str, **change) -> dict:
    return {"model_type": kind, **TINY, **(MOE if kind.endswith("moe") else {}), **change}


def tensors(family: Family, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in family.shapes().items()}


def megatron_names(family: Family, tied: bool) -> set[str]:
    """Written out by hand from Megatron's local layer spec, apart from the rules."""
    names = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"}
    if not tied:
        names.add("output_layer.weight")
    for i in range(3):
        p = f"decoder.layers.{i}."
        names |= {p + "input_layernorm.weight", p + "pre_mlp_layernorm.weight"}
        names |= {p + "self_attention.linear_qkv.weight", p + "self_attention.linear_proj.weight"}
        if family.model_type != "llama":
            names |= {p + "self_attention.q_layernorm.weight", p + "self_attention.k_layernorm.weight"}
        if family.model_type == "qwen3_moe":
            names.add(p + "mlp.router.weight")
            names |= {f"{p}mlp.experts.local_experts.{e}.linear_fc{n}.weight" for e in range(6) for n in (1, 2)}
        else:
            names |= {p + "mlp.linear_fc1.weight", p + "mlp.linear_fc2.weight"}
    return names


@pytest.mark.parametrize("kind", model_types())
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.defect("E20")
def test_every_name_is_matched_once(kind, tied):
    family = family_of(config(kind, tie_word_embeddings=tied))
    assert sorted(p.name for p in family.globals()) == sorted(megatron_names(family, tied))
    used = [hf for p in family.globals() for hf in p.hf]
    assert len(used) == len(set(used)) and set(used) == set(family.names()) == set(family.shapes())
    assert ("lm_head.weight" in used) is not tied


@pytest.mark.parametrize("kind", model_types())
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 1), (2, 1, 1), (2, 3, 1), (6, 1, 1), (1, 3, 2), (3, 1, 6), (2, 3, 3)])
@pytest.mark.defect("E15")
@pytest.mark.defect("E16")
@pytest.mark.defect("E17")
def test_round_trip_over_all_ranks(kind, tied, tp, pp, ep):
    """Each rank cuts what it holds out of the Hugging Face tensors; together the ranks give them back, bit for bit."""
    ep = ep if kind == "qwen3_moe" else 1
    family = family_of(config(kind, tie_word_embeddings=tied))
    family.check_layout(tp=tp, pp=pp, ep=ep)
    hf = tensors(family, torch.bfloat16)
    ranks = {}  # (tp rank, stage, ep rank) -> {global name: shard}
    for r in range(tp):
        for s in range(pp):
            for x in range(ep):
                experts = (None, *range(x * 6 // ep, (x + 1) * 6 // ep))
                held = [p for p in family.globals() if stage_of(p, pp) == s and p.expert in experts]
                ranks[r, s, x] = {p.name: family.to_mcore(p.name, hf.__getitem__, tp, r).clone() for p in held}
    back: dict[str, torch.Tensor] = {}
    for p in family.globals():
        x = (p.expert or 0) * ep // 6
        made = family.to_hf(p.name, [ranks[r, stage_of(p, pp), x][p.name] for r in range(tp)])
        assert not back.keys() & made.keys()
        back |= made
    assert back.keys() == hf.keys()
    for name in hf:
        assert torch.equal(back[name], hf[name]) and back[name].dtype == torch.bfloat16, name


def stage_of(param, pp: int) -> int:
    if param.layer is not None:
        return param.layer * pp // 3
    return 0 if param.name.startswith("embedding") else pp - 1


@pytest.mark.parametrize("kind", model_types())
@pytest.mark.defect("E17")
def test_last_stage_of_a_tied_model_holds_the_embedding(kind):
    family = family_of(config(kind, tie_word_embeddings=True))
    hf = tensors(family)
    head = family.to_mcore("output_layer.weight", hf.__getitem__, 2, 1)
    assert torch.equal(head, family.to_mcore("embedding.word_embeddings.weight", hf.__getitem__, 2, 1))
    assert "output_layer.weight" not in [p.name for p in family.globals()]


@pytest.mark.defect("E16")
def test_vocabulary_is_padded_with_zero_rows_to_a_multiple_of_tp():
    family = family_of(config("llama"))
    hf = tensors(family)
    shards = [family.to_mcore("output_layer.weight", hf.__getitem__, 6, r) for r in range(6)]
    assert [tuple(s.shape) for s in shards] == [(12, 24)] * 6  # 67 rows -> 72 = 6 * 12
    assert torch.equal(torch.cat(shards)[:67], hf["lm_head.weight"]) and not torch.cat(shards)[67:].any()
    assert family.to_hf("output_layer.weight", shards)["lm_head.weight"].shape == (67, 24)
    assert [padded_vocabulary(67, tp) for tp in (1, 2, 4, 67, 80)] == [67, 68, 68, 67, 80]


def test_ranks_whose_rows_are_all_padding():
    family = family_of(config("llama", vocab_size=2))
    hf = tensors(family)
    shards = [family.to_mcore("embedding.word_embeddings.weight", hf.__getitem__, 3, r) for r in range(3)]
    assert torch.equal(shards[1], hf["model.embed_tokens.weight"][1:]) and not shards[2].any() and shards[2].shape == (1, 24)


def test_qkv_rows_interleave_by_group():
    """Two groups of two query heads of size 1: Megatron's rows are q0 q1 k0 v0 | q2 q3 k1 v1."""
    family = family_of(config("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=1, hidden_size=1))
    rows = {"q": [0, 1, 2, 3], "k": [10, 11], "v": [20, 21]}
    hf = {f"model.layers.0.self_attn.{x}_proj.weight": torch.tensor(v)[:, None] for x, v in rows.items()}
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert family.to_mcore(name, hf.__getitem__, 1, 0).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert family.to_mcore(name, hf.__getitem__, 2, 1).flatten().tolist() == [2, 3, 11, 21]


def test_gate_and_up_stay_apart_under_tp():
    """fc1 of rank 1 of 2 is the second half of gate, then the second half of up."""
    family = family_of(config("llama", intermediate_size=4, hidden_size=1, num_attention_heads=2, num_key_value_heads=2))
    hf = {f"model.layers.1.mlp.{x}_proj.weight": torch.arange(4)[:, None] + n for x, n in (("gate", 0), ("up", 10))}
    assert family.to_mcore("decoder.layers.1.mlp.linear_fc1.weight", hf.__getitem__, 2, 1).flatten().tolist() == [2, 3, 12, 13]


def test_facts_for_megatron_come_from_the_config():
    family = family_of(config("qwen3_moe", rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rms_norm_eps=1e-5))
    facts = family.transformer_kwargs()
    assert (facts["num_layers"], facts["num_query_groups"], facts["kv_channels"]) == (3, 6, 10)
    assert (facts["num_moe_experts"], facts["moe_router_topk"], facts["moe_ffn_hidden_size"]) == (6, 2, 18)
    assert facts["qk_layernorm"] and not facts["moe_router_pre_softmax"] and facts["layernorm_epsilon"] == 1e-5
    assert family.model_kwargs()["rotary_base"] == 5e5 and family.model_kwargs()["vocab_size"] == 67
    assert family_of(config("qwen3_moe", norm_topk_prob=False)).transformer_kwargs()["moe_router_pre_softmax"]
    old = family_of(config("llama", rope_theta=2e4, rope_scaling=None))
    assert old.arch.rope_theta == 2e4 and "num_moe_experts" not in old.transformer_kwargs()
    assert family_of(config("llama", head_dim=None)).arch.head_dim == 24 // 12
    assert family_of(config("qwen3", head_dim=None)).arch.head_dim == 128
    renamed = config("qwen3_moe") | {"num_local_experts": 6}
    del renamed["num_experts"]  # the name that transformers 5 writes
    assert family_of(renamed).arch.experts == 6


REFUSED = [
    ("llama", {"attention_bias": True}, "attention_bias is True"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'rope_type': 'linear'"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}, "'rope_type': 'llama3'"),
    ("llama", {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, "is 10000.0 but rope_parameters say 500000.0"),
    ("llama", {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "yarn"}}, "keep one of them"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
    ("llama", {"final_logit_softcapping": 30.0}, "no rule of llama knows this key"),
    ("llama", {"num_key_value_heads": 5}, "num_key_value_heads=5 does not divide num_attention_heads=12"),
    ("llama", {"vocab_size": None}, "vocab_size is missing"),
    ("llama", {"hidden_size": "24"}, "hidden_size is '24', but must be a positive integer"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window is True"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers is \\[0\\]"),
    ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 exceeds the 6 experts"),
    ("qwen3_moe", {"num_experts_per_tok": 1}, "the router cannot learn"),
    ("qwen3_moe", {"num_local_experts": 5}, "num_experts=6 and num_local_experts=5 differ"),
    ("gpt2", {}, "model_type is 'gpt2', which has no family; known: llama, qwen3, qwen3_moe"),
]


@pytest.mark.parametrize(("kind", "change", "message"), REFUSED, ids=[f"{k}-{'-'.join(c)}" for k, c, _ in REFUSED])
@pytest.mark.defect("E25")
def test_config_without_a_rule_is_refused(kind, change, message):
    with pytest.raises(ConvertError, match=message):
        family_of(config(kind, **change))


def test_neutral_keys_change_nothing():
    plain = family_of(config("llama"))
    neutral = dict.fromkeys(NEUTRAL - {"model_type"}, "anything")
    assert family_of(config("llama", **neutral, pruned_heads={}, sep=None)) == plain


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 4}, "tp=4 does not divide the model's num_key_value_heads \\(6\\); use one of 1, 2, 3, 6"),
        ({"pp": 2}, "pp=2 does not divide the model's num_hidden_layers \\(3\\); use one of 1, 3"),
        ({"ep": 2}, "ep=2 does not divide the model's number of experts \\(1\\); use one of 1"),
    ],
)
def test_layout_that_does_not_divide_is_refused(layout, message):
    with pytest.raises(ConvertError, match=message):
        family_of(config("llama")).check_layout(**layout)


def test_wrong_names_and_shapes_are_errors():
    family = family_of(config("qwen3"))
    hf = tensors(family)
    with pytest.raises(ConvertError, match=r"decoder\.layers\.9\.input_layernorm\.weight has no rule in family qwen3"):
        family.to_mcore("decoder.layers.9.input_layernorm.weight", hf.__getitem__, 1, 0)
    hf["model.norm.weight"] = torch.ones(23)
    with pytest.raises(ConvertError, match=r"model\.norm\.weight has shape \(23,\), but the config implies \(24,\)"):
        family.to_mcore("decoder.final_layernorm.weight", hf.__getitem__, 1, 0)
    with pytest.raises(ConvertError, match=r"2 shards of decoder\.layers\.0\.self_attention\.linear_proj"):
        family.to_hf("decoder.layers.0.self_attention.linear_proj.weight", [torch.ones(24, 7)] * 2)
    with pytest.raises(ConvertError, match="tensor parallel size 4 does not divide dimension 0 of"):
        family.to_mcore("decoder.layers.0.mlp.linear_fc1.weight", hf.__getitem__, 4, 0)
    with pytest.raises(ConvertError, match="replicated parameter differs between tensor parallel ranks 0 and 1"):
        family.to_hf("decoder.final_layernorm.weight", [torch.ones(24), torch.zeros(24)])


@pytest.mark.parametrize("kind", model_types())
def test_random_start_depends_on_seed_and_name_only(kind):
    family = family_of(config(kind, initializer_range=0.05))
    one, same, other = RandomSource(family, 3), RandomSource(family, 3), RandomSource(family, 4)
    check_source(family, one)
    for name in reversed(family.names()):  # another order of reading
        assert torch.equal(one.get(name), same.get(name))
    name = "model.layers.1.self_attn.o_proj.weight"
    assert not torch.equal(one.get(name), other.get(name))
    assert not torch.equal(one.get(name), one.get(name.replace("layers.1", "layers.2")))
    assert torch.equal(one.get("model.norm.weight"), torch.ones(24))
    drawn = one.get("model.embed_tokens.weight")  # 67 * 24 draws: five standard errors around 0 and 0.05
    assert abs(drawn.mean()) < 5 * 0.05 / math.sqrt(67 * 24) and abs(drawn.std() - 0.05) < 5 * 0.05 / math.sqrt(2 * 67 * 24)


@st.composite
def models(draw):
    size = lambda most: draw(st.integers(1, most))  # noqa: E731
    tp, kind = size(4), draw(st.sampled_from(model_types()))
    groups = tp * size(3)
    shape = {
        "num_key_value_heads": groups, "num_attention_heads": groups * size(3), "head_dim": size(5), "hidden_size": size(9),
        "num_hidden_layers": size(2), "intermediate_size": tp * size(5), "vocab_size": size(23),
        "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip
    if kind == "qwen3_moe":
        shape |= {"num_experts": size(4), "num_experts_per_tok": 1, "norm_topk_prob": False}
        shape["moe_intermediate_size"] = tp * size(3)
    return config(kind, **shape), tp, draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))


@settings(max_examples=60, deadline=None)
@given(models())
def test_round_trip_of_any_model(case):
    hf_config, tp, dtype = case
    family = family_of(hf_config)
    family.check_layout(tp=tp)
    hf = tensors(family, dtype)
    check_source(family, DictSource(hf))
    back: dict[str, torch.Tensor] = {}
    for p in family.globals():
        shards = [family.to_mcore(p.name, hf.__getitem__, tp, r) for r in range(tp)]
        assert len({s.shape for s in shards}) == 1
        if p.tp_dim is None:
            assert all(torch.equal(s, shards[0]) for s in shards)
        back |= family.to_hf(p.name, shards)
    assert back.keys() == hf.keys() and all(torch.equal(back[n], hf[n]) for n in hf)
