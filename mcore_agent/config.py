"""The configuration: a frozen tree of dataclasses is the schema, a recipe and ``key=value`` words fill it in.

Each default is written once, here. ``load_config`` refuses unknown keys, wrong types and impossible combinations
with the key, its value, the reason and the way out; what it returns can run.
"""

import dataclasses
import difflib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf import errors as oc_errors
from yaml import YAMLError

from mcore_agent.layout import Layout


class ConfigError(ValueError):
    """A configuration that cannot run."""

    def __init__(self, key: str, value: Any, reason: str, way_out: str):
        super().__init__(f"{key} = {value!r}: {reason}. {way_out}")
        self.key = key
        self._made_of = key, value, reason, way_out

    def __reduce__(self) -> Any:
        return ConfigError, self._made_of


def key(default: Any, doc: str, *, choices: Sequence[Any] = (), low: float = -math.inf, harmless: bool = False) -> Any:
    """A field: its default, one line on meaning and unit, its legal values; harmless keys may change on a resume."""
    metadata = {"doc": doc, "choices": tuple(choices), "low": low, "harmless": harmless}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RunConfig:
    dir: str = key("", "run folder; empty: a new one under runs/", harmless=True)
    seed: int = key(0, "seed of tasks, sampling and random weights", low=0)
    steps: int = key(100, "steps of each stage that does not give its own", low=1)
    threads: int = key(0, "torch threads per rank; 0: cores divided by local ranks", low=0)
    save_every: int = key(0, "steps between checkpoints; 0: only at the end of each stage", low=0, harmless=True)
    keep: int = key(2, "checkpoints kept", low=1, harmless=True)
    async_save: bool = key(False, "go on while a checkpoint's files are written; needs host memory for its tensors", harmless=True)
    eval_tasks: int = key(0, "tasks of each evaluation; 0: no evaluation", low=0)
    eval_split: str = key("eval", "split that evaluations play")
    export: bool = key(False, "write a Hugging Face folder at the end")
    late_s: float = key(300.0, "seconds after which a hand-over is called late, with who is late; 0: never", low=0, harmless=True)


@dataclass(frozen=True)
class ModelConfig:
    path: str = key("", "Hugging Face folder or converted Megatron checkpoint")
    config: dict[str, Any] = key({}, "Hugging Face config of a model that starts from random weights")
    vocab: int = key(0, "size of a tokenizer trained on the environment's demonstrations (with model.config)", low=0)


@dataclass(frozen=True)
class LearnerConfig:
    tp: int = key(1, "tensor-parallel ranks", low=1)
    pp: int = key(1, "pipeline-parallel ranks", low=1)
    vpp: int = key(1, "interleaved parts of the layers on each pipeline rank", low=1)
    cp: int = key(1, "context-parallel ranks: they split the tokens of a micro-batch", low=1)
    dp: int = key(1, "data-parallel ranks", low=1)
    ep: int = key(1, "expert-parallel ranks, taken from the tp * cp * dp ranks of a stage", low=1)
    etp: int = key(0, "tensor-parallel ranks of an expert; 0: as tp", low=0)
    sp: str = key("auto", "sequence parallelism; auto: with tp above 1", choices=("auto", "on", "off"))
    recompute: str = key("off", "activations that backward computes again", choices=("off", "selective", "full"))
    dispatcher: str = key("alltoall", "how tokens travel to experts", choices=("alltoall", "allgather"))
    grouped_gemm: str = key("auto", "experts of a layer as one product; auto: where it can (GPU, bf16)", choices=("auto", "on", "off"))
    routing_replay: str = key("off", "training's experts: its own; those before the batch; the engine's", choices=("off", "old", "rollout"))
    aux_loss: float = key(0.0, "weight of the routers' load-balancing loss; 0: off", low=0)
    z_loss: float = key(0.0, "weight of the routers' z loss; 0: off", low=0)
    backend: str = key("auto", "communication", choices=("auto", "gloo", "nccl"))
    optimizer: str = key("adamw", "what steps the weights", choices=("adamw", "sgd", "muon"))
    betas: list[float] = key([0.9, 0.95], "AdamW's decay rates")
    eps: float = key(1e-8, "AdamW's epsilon", low=0)
    weight_decay: float = key(0.0, "decay per step in learning rates, not applied to norms and biases", low=0)
    momentum: float = key(0.95, "sgd, muon: part of the last update direction that is kept", low=0)
    nesterov: bool = key(True, "sgd, muon: look ahead by the momentum")
    scale: str = key("rms_match", "muon: size of an update, as AdamW's or by fan-in", choices=("rms_match", "fan_in"))
    rest_lr: float = key(1.0, "muon: learning rate of embeddings, head and norms, in learning rates of Muon", low=0)
    offload: bool = key(False, "adamw: moments and master weights live in host memory (GPU, bf16)")
    clip_grad: float = key(1.0, "largest gradient norm; 0: no clipping", low=0)


@dataclass(frozen=True)
class PrecisionConfig:
    dtype: str = key("fp32", "of parameters and activations", choices=("fp32", "bf16"))
    fp8: str = key("off", "scaling recipe of FP8 matrix products", choices=("off", "delayed", "current", "blockwise", "mxfp8"))
    fp8_format: str = key("hybrid", "e4m3, or hybrid: e5m2 for gradients of activations", choices=("hybrid", "e4m3"))
    fp8_edge_bf16: int = key(0, "layers at either end of the model whose products stay in bf16", low=0)
    fp8_params: bool = key(False, "weights of FP8 products are kept in FP8, beside fp32 master weights")


@dataclass(frozen=True)
class RolloutConfig:
    engine: str = key("local", "inference engine")
    engines: int = key(0, "number of engines; 0: as many as the learner's GPUs hold, one without GPUs", low=0)
    tp: int = key(1, "GPUs of an engine", low=1)
    options: dict[str, Any] = key({}, "further arguments of the engine")
    placement: str = key("colocated", "engine and learner take turns, or each has its own devices", choices=("colocated", "separate"))
    max_lag: int = key(0, "weight versions (one per batch) that a token may be behind when it is learned from; 0: on-policy", low=0)
    over_sample: float = key(0.0, "further groups that each step starts, in parts of rollout.prompts; the first to end are taken", low=0)
    fp8: str = key("off", "of engine weights; blockwise: projections, with a scale per 128 x 128 block (GPU)", choices=("off", "blockwise"))
    draft_low: int = key(4, "engines that draft do so from this many running requests down", low=0)
    draft_high: int = key(16, "and stop from this many up; above draft_low", low=1)
    stall_s: float = key(60.0, "seconds without a token after which an engine counts as frozen; above 0", harmless=True)
    prompts: int = key(8, "tasks per step", low=1)
    group_size: int = key(16, "episodes per task", low=1)
    temperature: float = key(1.0, "of sampling and of the learner's log-probabilities; above 0")
    top_p: float = key(1.0, "nucleus mass that sampling keeps")
    top_k: int = key(0, "most likely tokens that sampling keeps; 0: all", low=0)
    max_turns: int = key(8, "assistant turns per episode", low=1)
    max_new: int = key(256, "tokens per assistant turn", low=1)
    max_tokens: int = key(4096, "tokens per row, prompt and observations included", low=2)
    max_batch: int = key(256, "requests that the local engine runs together", low=1)
    retries: int = key(2, "replays of an episode whose environment or engine failed", low=0)
    parser: str = key("hermes", "tool-call format")


@dataclass(frozen=True)
class CriticConfig:
    mode: str = key("off", "who values states: nobody, a model of its own, or a head on the policy", choices=("off", "separate", "shared"))
    lr: float = key(0.0, "separate: peak learning rate, on the stage's schedule; 0: the stage's", low=0)
    coef: float = key(0.5, "of the loss of the values; above 0", low=0)
    clip: float = key(0.0, "how far a value may move within a batch and still lower its loss; 0: any way", low=0)
    detach: bool = key(False, "shared: the loss of the values trains the head alone")
    warmup: int = key(0, "separate: steps of each rl stage that train the critic before the policy's begin", low=0)


@dataclass(frozen=True)
class TeacherConfig:
    path: str = key("", "Hugging Face folder of the model that loss terms distill from; with the policy's tokenizer")


@dataclass(frozen=True)
class BatchConfig:
    token_budget: int = key(8192, "tokens per micro-batch; a longer row gets one of its own", low=1)
    minibatches: int = key(1, "optimizer steps per collected batch", low=1)


@dataclass(frozen=True)
class CorrectionConfig:
    """How much a sampled token counts when other weights, or another engine's arithmetic, have sampled it."""

    treatment: str = key("auto", "of w = learner's / engine's; auto: truncate or off", choices=("auto", "off", "truncate", "clip", "mask"))
    level: str = key("token", "whose w: the token's, the episode's, or its mean per token", choices=("token", "sequence", "geometric"))
    low: float = key(0.0, "clip, mask: lower end of the band; at most 1", low=0)
    high: float = key(2.0, "upper end of the band; at least 1", low=1)
    max_age: int = key(0, "weight versions after which a token is not trained on; 0: rollout.max_lag decides", low=0)
    dump_every: int = key(0, "steps between dumps of the rows on which engine and learner differ most; 0: none", low=0)
    stop: bool = key(False, "end the run when engine and learner drift apart, instead of saying so")


@dataclass(frozen=True)
class TrackingConfig:
    wandb: str = key("disabled", "Weights & Biases", choices=("disabled", "offline", "online"), harmless=True)
    project: str = key("mcore_agent", "project there", harmless=True)
    name: str = key("", "run name there; empty: the run folder's name", harmless=True)


@dataclass(frozen=True)
class StageConfig:
    """One stage of a run. ``sft`` imitates demonstrations, ``rl`` learns from its own episodes."""

    kind: str = key("rl", "what the stage does", choices=("sft", "rl"))
    steps: int = key(0, "optimizer steps at most; 0: run.steps", low=0)
    lr: float = key(1e-6, "peak learning rate", low=0)
    warmup: int = key(0, "steps of linear warm-up", low=0)
    schedule: str = key("constant", "after the warm-up", choices=("constant", "linear", "cosine"))
    lr_end: float = key(0.0, "fraction of lr at the stage's last step (linear, cosine)", low=0)
    demos: int = key(64, "sft: demonstrations per step", low=1)
    eval_every: int = key(0, "steps between evaluations; 0: only at the end", low=0)
    until_success: float = key(0.0, "end the stage once sampled success reaches this; 0: never", low=0)


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    env: dict[str, Any] = key({}, "environment: {name: ..., its arguments}")
    reward: list[dict[str, Any]] = key([{"name": "outcome"}], "rewards, summed")
    credit: list[dict[str, Any]] = key([{"name": "grpo"}], "estimator, then transforms")
    loss: list[dict[str, Any]] = key([{"name": "ppo_clip"}], "loss terms of the rl stages, summed")
    stages: list[StageConfig] = field(default_factory=lambda: [StageConfig()])

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def layout(self) -> Layout:
        """Of the learner's ranks. Raises LayoutError when there is no such layout."""
        c = self.learner
        sp = c.tp > 1 if c.sp == "auto" else c.sp == "on"
        return Layout(tp=c.tp, pp=c.pp, vpp=c.vpp, cp=c.cp, ep=c.ep, etp=c.etp, dp=c.dp, sp=sp)

    @property
    def world(self) -> int:
        """Number of learner ranks."""
        return self.layout.world

    def steps(self, stage: StageConfig) -> int:
        return stage.steps or self.run.steps


# ------------------------------------------------------------------------------------------------- loading


def load_config(recipe: str | Path, words: Sequence[str] = (), overlays: Sequence[str | Path] = (), gpu: str | None = None) -> Config:
    """Recipe, then overlays, then ``key=value`` words. Raises ConfigError; starts nothing.

    It can run on this machine or, with ``gpu``, on one with such GPUs (``precision.GPUS``).
    """
    merged = OmegaConf.structured(Config)
    for path in (recipe, *overlays):
        merged = _merge(merged, _read(path), str(path))
    for word in words:
        merged = _set_word(merged, word)
    try:
        config: Config = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except oc_errors.OmegaConfBaseException as e:
        raise ConfigError("recipe", str(recipe), _first_line(e), "Give the key a value") from e
    from mcore_agent.config_losses import check_all

    config = _switches(config)
    _check_fields(config, "")
    check_all(config, gpu)
    return config


def _switches(config: Config) -> Config:
    """YAML reads the words on and off as true and false, also where a key has them among other words."""
    for name, f in _all_keys(Config).items():
        section, _, leaf = name.rpartition(".")
        if section and "off" in f.metadata["choices"]:
            part = getattr(config, section)
            word = {"True": "on", "False": "off"}.get(getattr(part, leaf))
            if word is not None:
                config = dataclasses.replace(config, **{section: dataclasses.replace(part, **{leaf: word})})
    return config


def config_from_dict(values: dict[str, Any]) -> Config:
    """The configuration that ``Config.to_dict`` wrote. Raises ConfigError."""
    return OmegaConf.to_object(_merge(OmegaConf.structured(Config), OmegaConf.create(values), "config"))  # type: ignore[return-value]


def _read(path: str | Path) -> DictConfig:
    if Path(path).is_dir():
        inside = Path(path) / "config.yaml"
        raise ConfigError("recipe", str(path), "a folder, not a file", f"Give {inside}" if inside.is_file() else "See recipes/")
    if not Path(path).is_file():
        near = difflib.get_close_matches(str(path), [str(p) for p in Path("recipes").glob("*.yaml")], n=1, cutoff=0.5)
        raise ConfigError("recipe", str(path), "no such file", f"Did you mean {near[0]}?" if near else "See recipes/")
    try:
        loaded = OmegaConf.load(path)
    except Exception as e:
        raise ConfigError("recipe", str(path), f"not readable as YAML ({_first_line(e)})", "Mend the file") from e
    if not isinstance(loaded, DictConfig):
        raise ConfigError("recipe", str(path), "not a mapping", "Start from a file in recipes/")
    return loaded


def _merge(base: DictConfig, part: Any, origin: str) -> DictConfig:
    with _refusals("configuration", origin):
        return OmegaConf.merge(base, part)  # type: ignore[return-value]


def _set_word(base: DictConfig, word: str) -> DictConfig:
    """``key=value``; the value is read as YAML and replaces what was there. List items by number: ``stages.1.lr=1e-4``."""
    name, found, text = word.partition("=")
    if not found or not name or name.startswith("-"):
        raise ConfigError("command line", word, "not of the form key=value", "Write for example run.seed=1")
    # The schema is frozen, so a plain copy is changed and held to the schema again.
    plain = OmegaConf.create(OmegaConf.to_container(base))
    with _refusals(name, text):
        OmegaConf.update(cast(DictConfig, plain), name, OmegaConf.from_dotlist([f"value={text}"])["value"], merge=False)
        return OmegaConf.merge(OmegaConf.structured(Config), plain)  # type: ignore[return-value]


@contextmanager
def _refusals(name: str, value: str) -> Iterator[None]:
    """OmegaConf's refusals as ConfigErrors."""
    try:
        yield
    except (oc_errors.ConfigKeyError, oc_errors.ConfigAttributeError) as e:
        full = e.full_key or name
        raise ConfigError(full, value, "no such key", _nearest(name if name.startswith("stages") else full)) from e
    except (oc_errors.OmegaConfBaseException, YAMLError, TypeError, ValueError, AttributeError, IndexError) as e:
        full = e.full_key if isinstance(e, oc_errors.OmegaConfBaseException) and e.full_key not in (None, "", "value") else name
        raise ConfigError(full, value, f"wrong type or form ({_first_line(e)})", f"Its meaning: {_doc(full)}") from e


def _first_line(e: BaseException) -> str:
    return (str(e).splitlines() or [type(e).__name__])[0].rstrip(".")


def _all_keys(cls: type, prefix: str = "") -> dict[str, dataclasses.Field]:
    out: dict[str, dataclasses.Field] = {}
    for f in dataclasses.fields(cls):
        if isinstance(f.type, type) and dataclasses.is_dataclass(f.type):
            out |= _all_keys(f.type, f"{prefix}{f.name}.")
        else:
            out[prefix + f.name] = f
    return out


def _nearest(full: str) -> str:
    known = list(_all_keys(Config))
    near = difflib.get_close_matches(full, known, n=1) or [k for k in known if k.split(".")[-1] == full.split(".")[-1]][:1]
    if full.startswith("stages"):
        return f"A stage knows: {', '.join(f.name for f in dataclasses.fields(StageConfig))}"
    return f"Did you mean {near[0]}?" if near else f"Known sections: {', '.join(f.name for f in dataclasses.fields(Config))}"


def _doc(full: str) -> str:
    f = _all_keys(Config).get(full)
    return f.metadata["doc"] if f and f.metadata else f"{full} in mcore_agent/config.py"


def _check_fields(node: Any, prefix: str) -> None:
    for f in dataclasses.fields(node):
        value, name = getattr(node, f.name), prefix + f.name
        if dataclasses.is_dataclass(value):
            _check_fields(value, name + ".")
        elif isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            for i, item in enumerate(value):
                _check_fields(item, f"{name}[{i}].")
        elif f.metadata:
            choices, low = f.metadata["choices"], f.metadata["low"]
            if choices and value not in choices:
                raise ConfigError(name, value, "not a legal value", f"Choose one of {', '.join(map(str, choices))}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(name, value, "not finite", "Give a finite number")
            if isinstance(value, (int, float)) and value < low:
                raise ConfigError(name, value, f"below {low:g}", f"Give at least {low:g} ({f.metadata['doc']})")


# --------------------------------------------------------------------------------------------- run folders


def comparable(config: Config) -> dict[str, Any]:
    """What must be equal for a run folder to be resumed: the tree without its harmless keys."""
    tree = config.to_dict()
    for name, f in _all_keys(Config).items():
        if f.metadata and f.metadata["harmless"]:
            section, _, leaf = name.rpartition(".")
            tree[section].pop(leaf)
    return tree


def differences(a: Config, b: Config) -> list[str]:
    """Lines ``key: old -> new`` for every key that forbids resuming."""
    return list(_differences(comparable(a), comparable(b), ""))


def _differences(a: Any, b: Any, prefix: str):
    if isinstance(a, dict) and isinstance(b, dict):
        for k in sorted(a.keys() | b.keys()):
            yield from _differences(a.get(k), b.get(k), f"{prefix}.{k}" if prefix else k)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(x, y, f"{prefix}[{i}]")
    elif a != b:
        yield f"{prefix}: {a!r} -> {b!r}"


def save_config(config: Config, path: Path) -> None:
    from mcore_agent.state import write_atomic

    write_atomic(path, OmegaConf.to_yaml(OmegaConf.create(config.to_dict())).encode())


def read_config(path: Path) -> Config:
    """The configuration that ``save_config`` wrote. Raises ConfigError when the file is damaged."""
    return config_from_dict(OmegaConf.to_container(_read(path)))  # type: ignore[arg-type]


def threads_per_rank(config: Config) -> int:
    """``run.threads``, or the CPU cores that this process may use divided by the ranks of this host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return config.run.threads or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", config.world)))
