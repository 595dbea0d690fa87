"""The three commands on checkpoints that transformers wrote, through real ranks and back."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_convert import ConvertError
from ckpt_convert.__main__ import main
from ckpt_convert.commands import verify
from ckpt_convert.mcore_folder import Meta, read_meta, write_meta

SIZES = {
    "vocab_size": 67, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
    "num_hidden_layers": 4, "intermediate_size": 42, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 18, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
KEPT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CASES = {  # name -> (model class, its keys, dtype, flags of hf2mcore, flags of mcore2hf)
    "qwen3": ("Qwen3", {}, torch.float32, ("--tp", "2", "--pp", "2"), ()),
    "qwen3_moe": ("Qwen3Moe", EXPERTS, torch.float32, ("--ep", "2"), ()),
    "llama": ("Llama", {"tie_word_embeddings": True}, torch.bfloat16, (), ("--pp", "2")),
}


def make_hf(folder: Path, name: str) -> Path:
    """A small random model, saved by transformers itself, with the files of a tokenizer."""
    import transformers

    kind, keys, dtype, _, _ = CASES[name]
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES, **keys))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # norms apart from 1
    model.to(dtype).save_pretrained(folder)
    for file in KEPT:
        (folder / file).write_text(json.dumps(file))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """H, M and H2 of every case, and what the commands printed.

    One process gives all the commands, because importing Megatron is most of the cost; ranks beside it are its own.
    """
    root = tmp_path_factory.mktemp("convert")
    script = ["from ckpt_convert.__main__ import main", "if __name__ == '__main__':"]
    for name, (_, _, _, to_mcore, to_hf) in CASES.items():
        hf, mcore, back = make_hf(root / f"{name}-H", name), root / f"{name}-M", root / f"{name}-H2"
        for words in (
            ("hf2mcore", "--hf", hf, "--out", mcore, *to_mcore),
            ("verify", "--hf", hf, "--mcore", mcore),
            ("mcore2hf", "--mcore", mcore, "--out", back, *to_hf),
        ):
            script.append(f"    print({name!r}, {words[0]!r}, 'exit', main({[str(w) for w in words]!r}), flush=True)")
    full = ["hf2mcore", "--hf", str(root / "qwen3-H"), "--out", str(root / "full" / "M")]
    script += [  # a limit on the size of a file stands in for the end of the disk
        "    import resource, signal",
        "    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)",
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))",
        f"    print('full disk exit', main({full!r}))",
    ]
    (root / "commands.py").write_text("\n".join(script))
    out = subprocess.run([sys.executable, root / "commands.py"], capture_output=True, text=True, timeout=400)
    assert out.returncode == 0, out.stderr
    (root / "said").write_text(out.stdout)
    (root / "complained").write_text(out.stderr)
    return root


@pytest.mark.parametrize("name", CASES)
@pytest.mark.defect("E15")
@pytest.mark.defect("E16")
@pytest.mark.defect("E17")
def test_tensors_keys_and_files_come_back(made, name):
    before, after = load_file(made / f"{name}-H" / "model.safetensors"), load_file(made / f"{name}-H2" / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype == CASES[name][2]
        assert torch.equal(tensor, after[key]), key
    for file in (*KEPT, "config.json", "generation_config.json"):
        assert (made / f"{name}-H2" / file).read_bytes() == (made / f"{name}-H" / file).read_bytes()
    assert f"{name} mcore2hf exit 0" in (made / "said").read_text()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(made, name):
    said = (made / "said").read_text().splitlines()
    at = said.index(f"{name} verify exit 0")
    assert said[at - 1].startswith("largest logit difference ") and "within the tolerance 0.0001" in said[at - 1]


@pytest.mark.parametrize("name", CASES)
def test_transformers_loads_the_result(made, name):
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(made / f"{name}-{h}", local_files_only=True) for h in ("H", "H2")]
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys() and all(torch.equal(t, states[1][n]) for n, t in states[0].items())


def test_meta_tells_how_it_was_written(made):
    metas = {name: read_meta(made / f"{name}-M") for name in CASES}
    assert {n: m.dtype for n, m in metas.items()} == {"qwen3": "fp32", "qwen3_moe": "fp32", "llama": "bf16"}
    assert metas["qwen3"].layout == {"tp": 2, "pp": 2, "ep": 1, "dp": 1}
    assert metas["qwen3_moe"].layout == {"tp": 1, "pp": 1, "ep": 2, "dp": 2}
    assert len([f for f in metas["qwen3"].files if f.endswith(".distcp")]) == 4, "each of four ranks wrote its part"


def test_verify_notices_one_wrong_matrix(made):
    """Two logit functions that differ by a known amount; the tolerance is relative to the largest logit."""
    hf, mcore = made / "qwen3-H", made / "qwen3-M"
    seen = {}

    def off_by(distance):
        def logits(checkpoint, rows):
            from ckpt_convert.commands import _transformers_logits

            seen["logits"] = _transformers_logits(hf, rows)
            return [t + distance for t in seen["logits"]]

        return logits

    assert verify(hf, mcore, 1e-4, off_by(0.0))[0]
    scale = max(float(t.abs().max()) for t in seen["logits"])
    assert scale > 1 and verify(hf, mcore, 1e-4, off_by(5e-5 * scale))[0]
    assert not verify(hf, mcore, 1e-4, off_by(2e-4 * scale))[0]
    assert not verify(hf, mcore, 1e-4, off_by(float("nan")))[0]


def failing(capsys, *words: object) -> str:
    capsys.readouterr()
    assert main([str(w) for w in words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    return said.err


def test_bad_checkpoint_is_refused_before_anything_is_written(tmp_path, capsys):
    hf = make_hf(tmp_path / "H", "qwen3")
    out = tmp_path / "M"
    words = ("hf2mcore", "--hf", hf, "--out", out)
    assert "tp=3 does not divide the model's num_key_value_heads (2); use one of 1, 2" in failing(capsys, *words, "--tp", 3)
    assert "ep=2 does not divide the model's number of experts (1)" in failing(capsys, *words, "--ep", 2)
    weights = hf / "model.safetensors"
    tensors = load_file(weights)
    save_file({n: t for n, t in tensors.items() if n != "lm_head.weight"}, weights)
    assert f"{hf}: tensor lm_head.weight is missing" in failing(capsys, *words)
    save_file(tensors | {"extra": torch.ones(2)}, weights)
    assert f"{weights}: tensor extra has no rule in family qwen3" in failing(capsys, *words)
    save_file({n: t.half() for n, t in tensors.items()}, weights)
    assert "tensors are torch.float16" in failing(capsys, *words)
    save_file(tensors, weights)
    with weights.open("r+b") as f:
        f.truncate(weights.stat().st_size - 1)
    assert f"{weights} is truncated or damaged" in failing(capsys, *words)
    assert "config.json is missing" in failing(capsys, "hf2mcore", "--hf", tmp_path / "none", "--out", out)
    assert os.listdir(tmp_path) == ["H"]


def test_unfinished_checkpoint_is_not_taken_for_whole(made, tmp_path, capsys):
    mcore = tmp_path / "M"
    shutil.copytree(made / "qwen3-M", mcore)
    words = ("mcore2hf", "--mcore", mcore, "--out", tmp_path / "H2")
    shard = next((mcore / "tensors").glob("*.distcp"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])  # a copy that ran out of space
    assert f"{shard} has {len(data) - 1} bytes, meta.json says {len(data)}" in failing(capsys, *words)
    shard.unlink()
    assert f"{shard} has no bytes" in failing(capsys, *words)
    shard.write_bytes(data)
    (mcore / "COMPLETE").unlink()
    assert "was not written to its end (COMPLETE is missing)" in failing(capsys, *words)
    (mcore / "meta.json").unlink()
    assert "holds no meta.json" in failing(capsys, *words)
    assert "is not a folder" in failing(capsys, "mcore2hf", "--mcore", tmp_path / "none", "--out", tmp_path / "H2")
    write_meta(mcore, Meta("qwen3", "fp32", {}, format=99))
    (mcore / "COMPLETE").touch()
    with pytest.raises(ConvertError, match="format is 99, this release reads 1"):
        read_meta(mcore)
    assert not (tmp_path / "H2").exists()


def test_results_that_exist_and_models_that_differ(made, capsys):
    assert "exists already" in failing(capsys, "hf2mcore", "--hf", made / "qwen3-H", "--out", made / "llama-M")
    assert "exists already" in failing(capsys, "mcore2hf", "--mcore", made / "qwen3-M", "--out", made / "llama-H")
    assert "describe different models" in failing(capsys, "verify", "--hf", made / "llama-H", "--mcore", made / "qwen3-M")


def test_full_disk_is_one_line_and_leaves_nothing(made):
    assert (made / "said").read_text().splitlines()[-1] == "full disk exit 2"
    line = (made / "complained").read_text().splitlines()[-1]
    assert line.startswith("error: ") and "the tensors cannot be written (" in line and "is the disk full?" in line
    assert os.listdir(made / "full") == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_a_stopped_conversion_leaves_no_checkpoint_and_no_ranks(tmp_path, number):
    hf, out = make_hf(tmp_path / "H", "qwen3"), tmp_path / "M"
    words = [sys.executable, "-m", "ckpt_convert", "hf2mcore", "--hf", str(hf), "--out", str(out), "--tp", "2"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    tree: list[psutil.Process] = []
    while len(tree) < 3:  # torchrun and its two ranks
        assert process.poll() is None
        tree = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.02)
    process.send_signal(number)
    process.wait(timeout=80)
    _, alive = psutil.wait_procs(tree, timeout=20)
    assert not alive and not out.exists()
    left = [p.name for p in tmp_path.iterdir() if p != hf]
    assert all(name.startswith(".M.partial-") for name in left) and len(left) == (number == signal.SIGKILL)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert process.stderr is not None and process.stderr.read().splitlines()[-1] == "stopped; nothing was written"


def test_head_stored_twice_comes_back_twice(tmp_path):
    """Some tied checkpoints store the head as well; the export has the same key set again."""
    from ckpt_convert.commands import write_export
    from ckpt_convert.families import family_of
    from ckpt_convert.job import Job
    from ckpt_convert.source import RandomSource

    family = family_of({"model_type": "llama", **SIZES, "tie_word_embeddings": True})
    source = RandomSource(family, 0)
    tensors = ((name, source.get(name)) for name in source.names())
    job = Job("export", "", str(tmp_path), "fp32", ("lm_head.weight",))
    assert Job.from_json(job.to_json()) == job
    write_export(job, family, tensors)
    written = load_file(tmp_path / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"]) and len(written) == len(family.names()) + 1
