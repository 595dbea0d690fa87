"""What is refused before a server starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_agent.registry import create
from mcore_agent.rollout.sglang import options, server
from mcore_agent.rollout.sglang.options import ReleaseError, ServerOptionError, check_options, server_arguments
from tests.required import need
from tests.rollout.tiny import CONFIGS

BASE: dict[str, Any] = {"model": Path("/m"), "context": 160, "dtype": "fp32", "max_batch": 8, "tp": 1, "port": 0, "memory_saver": True}


@pytest.fixture(autouse=True)
def installed() -> None:
    need("sglang")


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mem_fraction_statik": 0.5}, "mem_fraction_statik is 0.5.*no such option; did you mean 'mem_fraction_static'"),
        ({"zzz": 1}, "zzz is 1.*no such option$"),
        ({"model_path": "x"}, "model_path is 'x'.*hf_config.*leave it out"),
        ({"tp_size": 2}, "tp_size.*rollout.tp"),
        ({"dp_size": 2}, "dp_size is 2, but must be 1.*rollout.engines"),
        ({"enable_dp_attention": True}, "enable_dp_attention"),
        ({"pp_size": 2}, "pp_size"),
        ({"disaggregation_mode": "prefill"}, "disaggregation_mode"),
        ({"weight_cache_mode": "on"}, "weight_cache_mode"),
        ({"speculative_num_steps": 3}, "nothing drafts without speculative_algorithm"),
        ({"speculative_accept_threshold_single": 0.9}, "must be 1.0.*policy's own"),
    ],
)
def test_options_that_cannot_work(given: dict[str, Any], message: str, cuda: bool):
    with pytest.raises(ServerOptionError, match=message):
        check_options(given, cuda)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative_algorithm": "SUFFIX"}, "must be one of EAGLE"),
        ({"speculative_algorithm": "EAGLE3"}, "needs a draft model"),
        ({"speculative_algorithm": "NGRAM", "speculative_draft_model_path": "x"}, "NGRAM drafts without a model"),
        ({"speculative_algorithm": "NGRAM", "enable_return_routed_experts": True}, "expert rows"),
    ],
)
def test_drafting_that_cannot_work(given: dict[str, Any], message: str):
    with pytest.raises(ServerOptionError, match=message):
        check_options(given, cuda=True)


@pytest.mark.defect("D3")
def test_host_cache_and_routed_experts_exclude_each_other():
    with pytest.raises(ServerOptionError, match="enable_hierarchical_cache is True.*expert rows"):
        check_options({"enable_hierarchical_cache": True, "enable_return_routed_experts": True}, cuda=True)
    check_options({"enable_hierarchical_cache": True}, cuda=True)
    check_options({"enable_return_routed_experts": True, "enable_hierarchical_cache": False}, cuda=True)


@pytest.mark.parametrize(
    "given", [{"enable_return_routed_experts": True}, {"enable_memory_saver": True}, {"speculative_algorithm": "NGRAM"}], ids=str
)
def test_what_needs_a_gpu(given: dict[str, Any]):
    with pytest.raises(ServerOptionError, match="GPU"):
        check_options(given, cuda=False)
    check_options(given, cuda=True)


def test_arguments():
    cpu = server_arguments({"mem_fraction_static": 0.2}, gpus=(), **BASE)
    assert cpu["device"] == "cpu" and cpu["mem_fraction_static"] == 0.2 and "enable_memory_saver" not in cpu
    assert cpu.keys() <= options.field_names()
    assert cpu["max_total_tokens"] >= 160 + 64
    two = server_arguments({}, gpus=(2, 3), **{**BASE, "tp": 2})
    assert two["base_gpu_id"] == 2 and two["tp_size"] == 2 and two["enable_memory_saver"] and "device" not in two
    assert two.keys() <= options.field_names()
    for gpus in ((0,), (0, 2), (1, 0)):
        with pytest.raises(ServerOptionError, match="gpus is"):
            server_arguments({}, gpus=gpus, **{**BASE, "tp": 2})


@pytest.mark.parametrize(
    ("found", "message"), [("0.5.22", "sglang is 0.5.22.*needs 0.5.23.*pip install"), ("", "not installed.*pip install")]
)
def test_another_release_is_refused_before_anything_starts(found: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(options, "installed", lambda: found)
    monkeypatch.setattr(server.subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(ReleaseError, match=message):
        create("engine", {"name": "sglang"}, hf_config=CONFIGS["qwen3"])


@pytest.mark.parametrize(
    ("change", "message"),
    [({"model_type": "xlm"}, "model_type 'xlm'.*cannot serve"), ({"model_type": "qwen3", "architectures": ["NoSuchModel"]}, "NoSuchModel")],
)
def test_models_that_it_cannot_serve(change: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        server.write_model({**CONFIGS["qwen3"], **change}, tmp_path)


@pytest.mark.defect("E25")
def test_the_served_model_is_the_configs(tmp_path: Path):
    """Shapes come from the config alone; end tokens are left out, for a request says itself where it stops."""
    assert server.write_model({**CONFIGS["qwen3"], "eos_token_id": 5}, tmp_path) == 160
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["eos_token_id"] is None and written["architectures"] == ["Qwen3ForCausalLM"]
    assert {k: v for k, v in CONFIGS["qwen3"].items() if k not in ("rope_theta",)}.items() <= written.items()
    assert written["rope_parameters"]["rope_theta"] == 12345.0


def test_log_probabilities_do_not_depend_on_the_shell(monkeypatch: pytest.MonkeyPatch):
    """That variable makes SGLang report them at temperature 1."""
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" not in server._environment(Path("/f"), cuda=False)
