"""Reading and writing safetensors: streamed, whole or not there, and every damage named."""

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_convert import ConvertError
from ckpt_convert.checksum import tensor_checksum
from ckpt_convert.families import family_of
from ckpt_convert.hfconfig import read_json
from ckpt_convert.source import DictSource, RandomSource, SafetensorsSource, check_source, common_dtype
from ckpt_convert.write import carry_files, whole_or_nothing, write_folder, write_safetensors

CONFIG = {
    "model_type": "llama", "hidden_size": 10, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 3, "intermediate_size": 14, "vocab_size": 23,
}  # fmt: skip
FAMILY = family_of(CONFIG)
LAST = "lm_head.weight"


def random_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    source = RandomSource(FAMILY, 0)
    return {name: source.get(name).to(dtype) for name in source.names()}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A folder of three shards with config and tokenizer files."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(CONFIG))
    write_folder(tmp_path / "hf", random_tensors().items(), FAMILY.shapes(), torch.float32, base, max_shard=4500)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 3
    return tmp_path / "hf"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard", [1, 1500, 10**9])
def test_written_files_are_those_of_safetensors(tmp_path, dtype, max_shard):
    """The independent reader of the safetensors package gives back the same bits, in any order of writing."""
    tensors = random_tensors(dtype)
    size = write_safetensors(tmp_path, reversed(tensors.items()), FAMILY.shapes(), dtype, max_shard)
    assert size == sum(t.numel() for t in tensors.values()) * dtype.itemsize
    back = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    assert back.keys() == tensors.keys() and all(torch.equal(back[n], t) and back[n].dtype == dtype for n, t in tensors.items())
    source = SafetensorsSource(tmp_path)
    check_source(FAMILY, source)
    assert common_dtype(source) == dtype and set(source.names()) == tensors.keys()
    assert all(torch.equal(source.get(n), t) and source.shape(n) == tuple(t.shape) for n, t in tensors.items())
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (max_shard < 10**9)
    if index.exists():
        content = read_json(index)
        assert content["metadata"]["total_size"] == size and content["weight_map"].keys() == tensors.keys()
        widest = max(t.numel() for t in tensors.values()) * dtype.itemsize
        for file in tmp_path.glob("*.safetensors"):
            held = sum(t.numel() for t in load_file(file).values()) * dtype.itemsize
            assert held <= max(max_shard, widest)


def test_writing_needs_memory_for_one_tensor_only(tmp_path):
    """60 tensors of 4 MB leave less than 10 of them in the high-water mark of the process."""
    code = f"""
import resource, sys, torch
from pathlib import Path
from ckpt_convert.source import SafetensorsSource
from ckpt_convert.write import write_safetensors
shapes = {{f"t{{i}}": (1024, 1024) for i in range(60)}}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_safetensors(Path({str(tmp_path)!r}), ((n, torch.full(s, 1.0)) for n, s in shapes.items()), shapes, torch.float32)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(out.stdout) < 40, "megabytes beyond the start"
    assert (tmp_path / "model.safetensors").stat().st_size > 60 * 4 * 2**20


@pytest.mark.parametrize("missing", [LAST, "model.layers.1.mlp.up_proj.weight"])
def test_missing_tensor(hf, missing):
    index = read_json(hf / "model.safetensors.index.json")
    shard = hf / index["weight_map"].pop(missing)
    tensors = load_file(shard)
    del tensors[missing]
    save_file(tensors, shard)
    with pytest.raises(ConvertError, match=f"{shard.name} lacks tensor {missing}"):
        SafetensorsSource(hf)  # the index still lists it
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConvertError, match=f"{hf}: tensor {missing} is missing, but the config implies it"):
        check_source(FAMILY, SafetensorsSource(hf))


def test_extra_tensor(hf):
    index = read_json(hf / "model.safetensors.index.json")
    shard = hf / index["weight_map"][LAST]
    extra = "model.layers.0.self_attn.q_proj.bias"
    save_file(load_file(shard) | {extra: torch.ones(18)}, shard)
    with pytest.raises(ConvertError, match=f"{shard.name} holds tensor {extra}, which .* does not list"):
        SafetensorsSource(hf)
    index["weight_map"][extra] = shard.name
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConvertError, match=f"{shard.name}: tensor {extra} has no rule in family llama"):
        check_source(FAMILY, SafetensorsSource(hf))


def test_wrong_shape(hf):
    shard = hf / read_json(hf / "model.safetensors.index.json")["weight_map"][LAST]
    save_file(load_file(shard) | {LAST: torch.ones(10, 23)}, shard)
    message = f"{shard.name}: tensor {LAST} has shape (10, 23), but the config implies (23, 10)"
    with pytest.raises(ConvertError, match=re.escape(message)):
        check_source(FAMILY, SafetensorsSource(hf))


@pytest.mark.parametrize("keep", [0, 5, 40, 1000, -1])
def test_truncated_file(hf, keep):
    shard = hf / "model-00002-of-00003.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:keep])
    with pytest.raises(ConvertError, match=f"{shard.name} is truncated or damaged"):
        SafetensorsSource(hf)


def test_folder_that_is_none(tmp_path, hf):
    with pytest.raises(ConvertError, match=r"holds neither model\.safetensors nor"):
        SafetensorsSource(tmp_path)
    (hf / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConvertError, match=r"model-00002-of-00003\.safetensors is missing, but .* lists it"):
        SafetensorsSource(hf)
    save_file(random_tensors(), hf / "model.safetensors")
    with pytest.raises(ConvertError, match=r"holds both model\.safetensors and"):
        SafetensorsSource(hf)
    (hf / "model.safetensors").unlink()
    (hf / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ConvertError, match=r"index\.json is not JSON"):
        SafetensorsSource(hf)
    with pytest.raises(ConvertError, match=r"config\.json is missing"):
        carry_files(tmp_path, hf)


def test_dtypes_that_the_learner_cannot_hold():
    tensors = random_tensors()
    message = "several dtypes: torch.float32 (model.embed_tokens.weight), torch.bfloat16 (model.norm.weight)"
    with pytest.raises(ConvertError, match=re.escape(message)):
        common_dtype(DictSource(tensors | {"model.norm.weight": torch.ones(10, dtype=torch.bfloat16)}))
    with pytest.raises(ConvertError, match=r"tensors are torch\.float16, the learner holds float32 or bfloat16"):
        common_dtype(DictSource({n: t.half() for n, t in tensors.items()}))


@pytest.mark.defect("E17")
def test_head_stored_beside_a_tied_embedding_must_equal_it():
    tied = family_of(CONFIG | {"tie_word_embeddings": True})
    tensors = random_tensors()
    del tensors[LAST]
    check_source(tied, DictSource(tensors))
    check_source(tied, DictSource(tensors | {LAST: tensors["model.embed_tokens.weight"].clone()}))
    message = "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight"
    with pytest.raises(ConvertError, match=re.escape(message)):
        check_source(tied, DictSource(tensors | {LAST: tensors["model.embed_tokens.weight"] + 1}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: list(t.items())[:-1], "1 tensors never came, the first is lm_head.weight"),
        (lambda t: [*t.items(), *list(t.items())[:1]], "tensor model.embed_tokens.weight came twice"),
        (lambda t: [("ghost", torch.ones(2))], "tensor ghost was not expected"),
        (lambda t: [(LAST, t[LAST].T)], r"tensor lm_head.weight is torch.float32 \(10, 23\), expected torch.float32 \(23, 10\)"),
        (lambda t: [(LAST, t[LAST].double())], "tensor lm_head.weight is torch.float64"),
    ],
)
def test_incomplete_export_leaves_nothing(tmp_path, hf, make, message):
    with pytest.raises(ConvertError, match=message):
        write_folder(tmp_path / "new" / "out", make(random_tensors()), FAMILY.shapes(), torch.float32, hf)
    assert os.listdir(tmp_path / "new") == []


def test_existing_result_is_kept(tmp_path, hf):
    before = {p.name: p.read_bytes() for p in hf.iterdir()}
    with pytest.raises(ConvertError, match="exists already; delete it or give another folder"):
        write_folder(hf, random_tensors().items(), FAMILY.shapes(), torch.float32, hf, replace=False)
    with pytest.raises(ConvertError, match="21 tensors never came"):  # replacing, but there is nothing to replace it with
        write_folder(hf, [], FAMILY.shapes(), torch.float32, hf)
    assert {p.name: p.read_bytes() for p in hf.iterdir()} == before
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", random_tensors().items(), FAMILY.shapes(), torch.float32, hf, replace=False)
    check_source(FAMILY, SafetensorsSource(tmp_path / "empty"))
    half = random_tensors(torch.bfloat16)
    write_folder(tmp_path / "empty", half.items(), FAMILY.shapes(), torch.bfloat16, hf)
    assert common_dtype(SafetensorsSource(tmp_path / "empty")) == torch.bfloat16


def test_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path, hf):
    """A limit on the size of a file stands in for the end of the disk: space is reserved before the first tensor."""
    asked = []
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, old[1]))
    try:
        with pytest.raises(ConvertError, match=f"cannot write {tmp_path}/new/out: File too large; nothing was kept"):
            tensors = ((n, asked.append(n) or t) for n, t in random_tensors().items())
            write_folder(tmp_path / "new" / "out", tensors, FAMILY.shapes(), torch.float32, hf)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert not asked and os.listdir(tmp_path / "new") == []
    with pytest.raises(ConvertError, match="No space left on device"), whole_or_nothing(tmp_path / "new" / "out"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_killed_writer_leaves_no_folder_of_that_name(tmp_path, hf):
    code = f"""
import time, torch
from pathlib import Path
from ckpt_convert.write import write_folder
def slow():
    yield "model.norm.weight", torch.ones(10)
    print("half", flush=True)
    time.sleep(60)
shapes = {{"model.norm.weight": (10,), "lm_head.weight": (23, 10)}}
write_folder(Path({str(tmp_path)!r}) / "out", slow(), shapes, torch.float32, Path({str(hf)!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "half\n"
    process.kill()
    process.wait()
    assert not (tmp_path / "out").exists()
    left = [p for p in tmp_path.iterdir() if p.name.startswith(".out.partial-")]
    assert len(left) == 1 and not (left[0] / "config.json").exists()
    write_folder(tmp_path / "out", random_tensors().items(), FAMILY.shapes(), torch.float32, hf)  # and the next run goes well


def test_carried_files(tmp_path, hf):
    kept = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "vocab.json"]
    for name in [*kept, "optimizer.pt", "pytorch_model.bin", "events.log"]:
        (hf / name).write_text(name)
    (hf / "additional_chat_templates").mkdir()
    (hf / "additional_chat_templates" / "rag.jinja").write_text("x")
    out = tmp_path / "carried"
    out.mkdir()
    assert carry_files(hf, out) == sorted([*kept, "config.json", "additional_chat_templates/rag.jinja"])
    assert all((out / name).read_text() == name for name in kept)


def test_checksum_tells_any_two_tensors_apart():
    base = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    same = [base.clone(), base.T.contiguous().T, torch.cat([base, base])[:2]]
    assert {tensor_checksum(t) for t in same} == {tensor_checksum(base)}
    flipped = base.clone()
    flipped.view(torch.int32)[1, 2] ^= 1  # the last bit of one element
    others = [base.reshape(3, 2), base.T, base.bfloat16(), base.half(), base.int(), flipped, base[0], base[0, 0]]
    zeros = [torch.zeros(2), -torch.zeros(2), torch.empty(0, 3), torch.empty(3, 0)]
    assert len({tensor_checksum(t) for t in [base, *others, *zeros]}) == 1 + len(others) + len(zeros)
    assert len(tensor_checksum(base)) == 32 and tensor_checksum(torch.nn.Parameter(base)) == tensor_checksum(base)
