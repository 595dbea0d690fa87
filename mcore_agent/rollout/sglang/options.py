"""The arguments of a server: what the engine sets, what a user may add, and what is refused before anything starts."""

import difflib
import importlib.util
import runpy
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RELEASE = "0.5.23"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
PLUGIN = "mcore_agent.rollout.sglang.inside.act"
EMPTY = "-1;empty"  # the weight version of a server that has no weights yet
SPARE = 8  # tokens of context that SGLang keeps for itself, so that a request may fill the model's
NEVER_S = 1e9
LOG_EVERY = 1 << 30  # decode steps between two lines of the log: never

# Set by the engine; a user's value would break its contract.
OWN = {
    "model_path": "the model comes from hf_config",
    "load_format": "weights come by publishing",
    "skip_tokenizer_init": "requests are token ids",
    "skip_server_warmup": "a server without weights has nothing to warm up",
    "weight_version": "the engine keeps its state there",
    "custom_weight_loader": "the engine needs its own",
    "dtype": "give dtype to the engine",
    "tp_size": "give tp to the engine (rollout.tp)",
    "base_gpu_id": "give gpus to the engine",
    "gpu_id_step": "give gpus to the engine",
    "context_length": "it is the model's own, max_position_embeddings",
    "host": "engine and server share a node",
    "max_running_requests": "give max_batch to the engine (rollout.max_batch)",
}
# Anything else makes the log-probabilities, the weights or the requests of one server ambiguous.
ONLY = {
    "dp_size": (1, "weights go to one replica; start more engines (rollout.engines)"),
    "pp_size": (1, "weights are read back by tensor-parallel rank; raise rollout.tp instead"),
    "nnodes": (1, "an engine lives on one node; start more engines (rollout.engines)"),
    "tokenizer_worker_num": (1, "pausing has to stop one entrance"),
    "enable_dp_attention": (False, "it needs dp_size above 1; start more engines (rollout.engines)"),
    "disaggregation_mode": ("null", "the engine sends prefill and decode to one server"),
    "weight_cache_mode": ("off", "a shared weight cache refuses updates"),
    "enable_http2": (False, "the engine speaks HTTP/1.1"),
    "api_key": (None, "the server listens on this node alone"),
    "speculative_accept_threshold_single": (1.0, "below 1 drafted tokens are not the policy's own samples"),
    "speculative_accept_threshold_acc": (1.0, "below 1 drafted tokens are not the policy's own samples"),
}
DRAFT_MODEL = ("EAGLE", "EAGLE3", "STANDALONE", "DFLASH")  # algorithms that need speculative_draft_model_path
NO_DRAFT_MODEL = ("NEXTN", "NGRAM")


class ServerOptionError(ValueError):
    """An option of the server that does not exist, is the engine's own, or does not go with another."""


class ReleaseError(RuntimeError):
    """SGLang is not installed, or not in the release that the engine was written for."""


def installed() -> str:
    """The release of SGLang that is installed; empty if none. Imports nothing."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""


def check_release() -> None:
    """Raises ReleaseError unless SGLang is there in the one release whose behaviour is known."""
    found = installed()
    if found != RELEASE:
        state = f"sglang is {found}" if found else "sglang is not installed"
        raise ReleaseError(f"{state}, but rollout.engine=sglang needs {RELEASE}: pip install -c constraints.txt -e '.[sglang]'")


@cache
def field_names() -> frozenset[str]:
    """The names of SGLang's ServerArgs, read from the file that lists them: importing sglang takes several seconds."""
    return frozenset(runpy.run_path(str(_package() / "arg_groups" / "field_order.py"))["POSITIONAL_FIELD_ORDER"])


def serves(architecture: str) -> bool:
    """Whether some model file of SGLang defines a class of this name."""
    wanted = f"class {architecture}(".encode()
    return any(wanted in path.read_bytes() for path in (_package() / "models").glob("*.py"))


def _package() -> Path:
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise ReleaseError("sglang is not installed: pip install -c constraints.txt -e '.[sglang]'")
    return Path(found.submodule_search_locations[0]) / "srt"


def check_recipe(options: Mapping[str, Any], cuda: bool) -> None:
    """The options of the engine in a recipe, as far as they can be judged here. Raises ServerOptionError."""
    port, start_s = (options.get("server") or {}).get("port", 0), options.get("start_s", 1)
    if type(port) is not int or not 0 <= port < 1 << 16:
        raise ServerOptionError(f"rollout.options.server.port is {port!r}, but no port; leave it out, and the server takes a free one")
    if not start_s > 0:
        raise ServerOptionError(f"rollout.options.start_s is {start_s}, but is a time in seconds; give more than 0")
    if installed():
        check_options({key: value for key, value in (options.get("server") or {}).items() if key != "port"}, cuda)


def check_options(options: Mapping[str, Any], cuda: bool) -> None:
    """Raises ServerOptionError, naming option, value, reason and way out."""

    def refuse(key: str, reason: str) -> None:
        raise ServerOptionError(f"rollout.options.server.{key} is {options[key]!r}, but {reason}")

    for key, value in options.items():
        if key not in field_names():
            near = difflib.get_close_matches(key, field_names(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            refuse(key, f"SGLang {RELEASE} has no such option{hint}")
        if key in OWN:
            refuse(key, f"{OWN[key]}; leave it out")
        if key in ONLY and value != ONLY[key][0]:
            refuse(key, f"must be {ONLY[key][0]!r}: {ONLY[key][1]}")
    if options.get("enable_hierarchical_cache") and options.get("enable_return_routed_experts"):
        refuse("enable_hierarchical_cache", "keys and values that come back from the host bring wrong expert rows; use one of the two")
    if options.get("enable_return_routed_experts") and not cuda:
        refuse("enable_return_routed_experts", "SGLang records experts on a GPU only; leave it out or use engine local")
    if options.get("enable_memory_saver") and not cuda:
        refuse("enable_memory_saver", "SGLang gives memory back on a GPU only; leave it out")
    _check_speculative(options, cuda, refuse)


def _check_speculative(options: Mapping[str, Any], cuda: bool, refuse: Any) -> None:
    given = [key for key in options if key.startswith("speculative_")]
    algorithm = options.get("speculative_algorithm")
    if given and algorithm is None:
        refuse(given[0], "nothing drafts without speculative_algorithm; give it, or leave this out")
    if algorithm is None:
        return
    if algorithm not in (*DRAFT_MODEL, *NO_DRAFT_MODEL):
        refuse("speculative_algorithm", f"must be one of {', '.join((*DRAFT_MODEL, *NO_DRAFT_MODEL))}")
    if not cuda:
        refuse("speculative_algorithm", "SGLang drafts on a GPU only; engine local drafts on a CPU (rollout.options.drafting=true)")
    if algorithm in DRAFT_MODEL and not options.get("speculative_draft_model_path"):
        refuse("speculative_algorithm", "it needs a draft model: give speculative_draft_model_path, or use NGRAM")
    if algorithm in NO_DRAFT_MODEL and options.get("speculative_draft_model_path"):
        refuse("speculative_draft_model_path", f"{algorithm} drafts without a model; leave it out")
    if options.get("enable_return_routed_experts"):
        refuse("speculative_algorithm", "drafted tokens that were rejected leave expert rows; use one of the two")


def server_arguments(
    options: Mapping[str, Any],
    *,
    model: Path,
    context: int,
    dtype: str,
    max_batch: int,
    tp: int,
    gpus: Sequence[int],
    port: int,
    memory_saver: bool,
) -> dict[str, Any]:
    """The fields of ServerArgs. ``gpus`` empty: a CPU. Raises ServerOptionError as ``check_options`` does."""
    check_options(options, bool(gpus))
    if gpus and (len(gpus) != tp or list(gpus) != list(range(gpus[0], gpus[0] + tp))):
        raise ServerOptionError(f"gpus is {tuple(gpus)}, but tp is {tp}: give {tp} device numbers in a row, one for each rank")
    own: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "weight_version": EMPTY,
        "custom_weight_loader": [PLUGIN],
        "dtype": DTYPES[dtype],
        "tp_size": tp,
        "context_length": context + SPARE,
        "host": "127.0.0.1",
        "port": port,
        "max_running_requests": max_batch,
    }
    usual: dict[str, Any] = {
        "random_seed": 0,
        "watchdog_timeout": NEVER_S,  # it takes requests that are paused for a scheduler that hangs, and kills it
        "sleep_on_idle": True,  # a scheduler without work would take a whole core
        "log_level": "warning",
        "log_level_http": "warning",
        "decode_log_interval": LOG_EVERY,
        "load_snapshot_publish_interval": 1,
    }
    if gpus:
        own |= {"base_gpu_id": gpus[0]}
        usual |= {"enable_memory_saver": memory_saver}
    else:
        tokens = max(context + 64, min(max_batch * context, 1 << 16))
        usual |= {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True, "sleep_on_idle": True}
        usual |= {"mem_fraction_static": 0.3, "max_total_tokens": tokens}
    return usual | dict(options) | own
