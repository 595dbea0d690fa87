"""Combinations of keys that cannot run, each refused with its reason and a way out."""

from pathlib import Path
from typing import Any

from ckpt_convert.errors import ConvertError
from ckpt_convert.mcore_folder import HF, is_mcore, read_meta
from mcore_agent.config import Config, ConfigError
from mcore_agent.credit.pipeline import Pipeline, kind_of
from mcore_agent.layout import LayoutError
from mcore_agent.precision import (
    Machine,
    PrecisionSpec,
    Split,
    check_offload,
    check_precision,
    grouped_gemm,
    planned,
    this_machine,
    token_multiple,
)
from mcore_agent.registry import RegistryError, check, create, get
from mcore_agent.reward.pipeline import make, make_all

NOTHING = "Nothing was started"
MOST = 1 << 20  # episodes that may be begun before the first batch
# Arguments of engines that follow from other keys.
GIVEN = frozenset({"name", "hf_config", "dtype", "max_batch", "tp", "gpus", "folder", "address"})
# Keys of the learner that only some optimizers read.
READ_BY = {
    "betas": ("adamw", "muon"),
    "eps": ("adamw", "muon"),
    "momentum": ("sgd", "muon"),
    "nesterov": ("sgd", "muon"),
    "scale": ("muon",),
    "rest_lr": ("muon",),
    "offload": ("adamw",),
}


def value_of(c: Config, name: str) -> Any:
    """What the configuration holds under ``section.key``."""
    section, _, leaf = name.partition(".")
    return c.to_dict()[section].get(leaf, "")


def check_rules(config: Config, gpu: str | None = None) -> None:
    """Raises ConfigError for the first rule that the configuration breaks, here or on a machine with ``gpu``."""
    for rule in (_model, _variants, _engine, _sampling, _layout, _optimizer, _stages):
        rule(config)
    _engine_options(config, gpu)
    if gpu is None:
        _hardware(config)
    _family(config)
    _fill(config)
    _precision(config, gpu)


def _model(c: Config) -> None:
    if bool(c.model.path) == bool(c.model.config):
        raise ConfigError("model.path", c.model.path, "exactly one of model.path and model.config must be given",
                          "Name a Hugging Face folder, or describe a model for a random start")  # fmt: skip
    if c.model.config and not c.model.vocab:
        raise ConfigError("model.vocab", 0, "a random start needs a tokenizer", "Give the vocabulary size, for example 384")
    if c.model.path and c.model.vocab:
        raise ConfigError("model.vocab", c.model.vocab, "model.path brings its own tokenizer", "Remove model.vocab")
    if c.model.path and not (Path(c.model.path) / "config.json").is_file() and not is_mcore(Path(c.model.path)):
        raise ConfigError("model.path", c.model.path, "neither a Hugging Face folder nor a Megatron checkpoint",
                          "Make it with tools/smollm2.py or python -m ckpt_convert")  # fmt: skip


def _variants(c: Config) -> None:
    if not c.env:
        raise ConfigError("env", c.env, "no environment given", "For example env: {name: hop_lookup}")
    if not c.credit:
        raise ConfigError("credit", c.credit, "no estimator given", "For example credit: [{name: grpo}]")
    specs: list[tuple[str, str, dict[str, Any]]] = [("env", "env", c.env)]
    specs += [(f"loss[{i}]", "loss", s) for i, s in enumerate(c.loss)]
    specs += [("rollout.parser", "parser", {"name": c.rollout.parser})]
    for where, kind, spec in specs:
        try:
            check(kind, spec)
            if kind != "env":  # making an environment may be costly; the others only look at their settings
                create(kind, spec)
        except ValueError as e:
            raise ConfigError(where, spec, str(e), "See docs/methods.md") from e
    for where, spec, make_part in (
        *((f"reward[{i}]", s, make) for i, s in enumerate(c.reward)),
        *((f"credit[{i}]", s, lambda s: create(kind_of(str(s.get("name", ""))), s)) for i, s in enumerate(c.credit)),
    ):
        try:
            make_part(spec)
        except ValueError as e:
            raise ConfigError(where, spec, str(e), "See docs/methods.md") from e
    try:
        Pipeline(c.credit)
    except ValueError as e:
        raise ConfigError("credit", [s["name"] for s in c.credit], str(e), "See docs/methods.md") from e
    try:
        make_all(c.reward)
    except ValueError as e:
        raise ConfigError("reward", [s["name"] for s in c.reward], str(e), "See docs/methods.md") from e


def _engine_options(c: Config, gpu: str | None) -> None:
    """What only the engine itself can judge."""
    engine = get("engine", c.rollout.engine)
    if not c.rollout.options:
        return
    try:
        engine.check_options(c.rollout.options, cuda=gpu is not None or this_machine().gpu is not None)
    except ValueError as e:
        raise ConfigError("rollout.options", c.rollout.options, str(e), "See the engine's own documentation") from e


def _engine(c: Config) -> None:
    r = c.rollout
    try:
        engine = get("engine", r.engine)
    except RegistryError as e:
        raise ConfigError("rollout.engine", r.engine, str(e), "Choose one of those") from e
    for name in set(r.options) & GIVEN:
        raise ConfigError(f"rollout.options.{name}", r.options[name], "follows from other keys", "Leave it out")
    try:
        check("engine", {"name": r.engine, **r.options}, supplied=GIVEN)
    except RegistryError as e:
        raise ConfigError("rollout.options", r.options, str(e), "Options are the engine's own arguments") from e
    if not engine.own_process:
        for name, value in (("engines", r.engines), ("tp", r.tp)):
            if value > 1:
                raise ConfigError(f"rollout.{name}", value, f"the {r.engine} engine is one, on one device", "Use another engine, or give 1")
    if r.fp8 != "off" and not engine.own_process:
        raise ConfigError("rollout.fp8", r.fp8, f"the {r.engine} engine has no FP8 products", "Use rollout.engine=sglang on GPUs")
    if r.draft_high <= r.draft_low:
        raise ConfigError("rollout.draft_high", r.draft_high, f"is not above draft_low = {r.draft_low}", "Between the two nothing changes")
    if 1 <= r.max_lag < r.over_sample:
        raise ConfigError("rollout.over_sample", r.over_sample, f"more than rollout.max_lag = {r.max_lag} batches would be begun at once",
                          "Lower it, or raise rollout.max_lag")  # fmt: skip
    episodes = max(r.max_lag + 1, 1 + r.over_sample) * r.prompts * r.group_size
    if episodes > MOST:
        sizes: tuple[tuple[str, float], ...] = (
            ("prompts", r.prompts),
            ("group_size", r.group_size),
            ("max_lag", r.max_lag),
            ("over_sample", r.over_sample),
        )
        key, most = max(sizes, key=lambda size: size[1])
        raise ConfigError(f"rollout.{key}", most, f"{episodes:.3g} episodes would be begun at once", f"Lower it: at most {MOST}")
    if r.stall_s <= 0:
        raise ConfigError("rollout.stall_s", r.stall_s, "every engine would count as frozen", "For example 60")


def _sampling(c: Config) -> None:
    if c.rollout.temperature <= 0:
        raise ConfigError("rollout.temperature", c.rollout.temperature, "greedy episodes have no gradient", "Give a value above 0")
    if not 0 < c.rollout.top_p <= 1:
        raise ConfigError("rollout.top_p", c.rollout.top_p, "not in (0, 1]", "1 keeps every token")
    if c.rollout.max_new >= c.rollout.max_tokens:
        raise ConfigError("rollout.max_new", c.rollout.max_new, f"a row holds {c.rollout.max_tokens} tokens with its prompt",
                          "Lower it or raise rollout.max_tokens")  # fmt: skip
    if c.batch.minibatches > c.rollout.prompts:
        raise ConfigError("batch.minibatches", c.batch.minibatches, f"there are only {c.rollout.prompts} groups per step",
                          "A group is never split: give at most rollout.prompts")  # fmt: skip


def _layout(c: Config) -> None:
    try:
        _ = c.layout
    except LayoutError as e:
        raise ConfigError(e.key, value_of(c, e.key), e.reason, NOTHING) from e


def _optimizer(c: Config) -> None:
    name = c.learner.optimizer
    for key, users in READ_BY.items():
        if name not in users:
            unused(c, f"{name} does not read it", f"learner.{key}", way_out=f"Leave the key out, or use {' or '.join(users)}")
    if len(c.learner.betas) != 2 or not all(0 <= b < 1 for b in c.learner.betas):
        raise ConfigError("learner.betas", c.learner.betas, "not two numbers in [0, 1)", "For example [0.9, 0.95]")
    if c.learner.eps == 0:
        raise ConfigError("learner.eps", 0.0, "a weight that never had a gradient would be divided by 0", "For example 1e-8")
    if c.learner.momentum >= 1:
        raise ConfigError("learner.momentum", c.learner.momentum, "updates would never die away", "Give a value below 1, for example 0.95")


def _stages(c: Config) -> None:
    if not c.stages:
        raise ConfigError("stages", [], "nothing to do", "Leave the key out for one rl stage")
    for i, stage in enumerate(c.stages):
        if stage.until_success and not (stage.eval_every and c.run.eval_tasks):
            raise ConfigError(f"stages[{i}].until_success", stage.until_success, "success is never measured",
                              "Give eval_every of the stage and run.eval_tasks")  # fmt: skip
        if stage.kind == "rl" and not c.loss:
            raise ConfigError("loss", [], "an rl stage has no loss", "For example loss: [{name: ppo_clip}]")


def unused(c: Config, why: str, *names: str, way_out: str = "Leave the key out") -> None:
    """Refuses keys, by full name, that are set although nothing would read them."""
    for name in names:
        value = value_of(c, name)
        if value != value_of(Config(), name):
            raise ConfigError(name, value, f"has no effect: {why}", way_out)


def _hardware(c: Config) -> None:
    asked = [("learner.backend", c.learner.backend, "nccl", "auto"), ("rollout.fp8", c.rollout.fp8, "blockwise", "off")]
    for name, value, needs, instead in asked:
        if value == needs:
            import torch

            if not torch.cuda.is_available():
                raise ConfigError(name, value, "this machine has no CUDA GPU", f"Use {name}={instead}")


def precision_of(c: Config) -> PrecisionSpec:
    p = c.precision
    return PrecisionSpec(p.dtype, p.fp8, p.fp8_format, p.fp8_edge_bf16, p.fp8_params)


def _precision(c: Config, gpu: str | None) -> None:
    from ckpt_convert.families import family_of

    spec, layout = precision_of(c), c.layout
    machine = Machine()
    if gpu is not None:
        machine = planned(gpu)
    elif spec.fp8 != "off" or c.learner.grouped_gemm == "on" or c.learner.offload:  # else torch need not load
        machine = this_machine()
    split = Split(layout.tp, layout.etp, layout.pp, c.learner.optimizer, c.learner.offload)
    check_precision(spec, family_of(hf_config_of(c)).arch, split, machine)
    grouped_gemm(c.learner.grouped_gemm, c.precision.dtype, machine)
    if c.learner.offload:
        check_offload(c.precision.dtype, machine)


def hf_config_of(c: Config) -> dict[str, Any]:
    """The Hugging Face config of the run's model. Raises ConfigError when its file is damaged."""
    if c.model.config:
        return {"vocab_size": c.model.vocab, **c.model.config}
    from ckpt_convert.hfconfig import read_json

    root = Path(c.model.path)
    try:
        return read_json((root / HF if is_mcore(root) else root) / "config.json")
    except ConvertError as e:
        raise ConfigError("model.path", c.model.path, str(e), "Make the folder again") from e


def _family(c: Config) -> None:
    from ckpt_convert.families import family_of

    hf = hf_config_of(c)
    try:
        family = family_of(hf)
    except ConvertError as e:
        name, value = ("model.path", c.model.path) if c.model.path else ("model.config", c.model.config)
        raise ConfigError(name, value, str(e), "See the table of models and layouts in the README") from e
    if family.arch.head_dim % 2:
        raise ConfigError("model.config" if c.model.config else "model.path", f"head_dim {family.arch.head_dim}",
                          "rotary embeddings turn pairs of elements", "Use an even head size")  # fmt: skip
    layout = c.layout
    sizes: list[dict[str, int]] = [{"tp": layout.tp}, {"pp": layout.pp}, {"ep": layout.ep}, {"etp": layout.etp}]
    for size in (*sizes, {"vpp": layout.vpp, "pp": layout.pp}):
        name, ranks = next(iter(size.items()))
        try:
            family.check_layout(**size)
        except ConvertError as e:
            raise ConfigError(f"learner.{name}", ranks, str(e), "See the table of models and layouts in the README") from e
    try:
        layout.check_experts(family.arch.experts)
    except LayoutError as e:
        raise ConfigError(e.key, value_of(c, e.key), e.reason, NOTHING) from e
    for name, default in (("dispatcher", "alltoall"), ("grouped_gemm", "auto"), ("aux_loss", 0.0), ("z_loss", 0.0),
                          ("routing_replay", "off")):  # fmt: skip
        value = value_of(c, f"learner.{name}")
        if value != default and not family.arch.experts:
            raise ConfigError(f"learner.{name}", value, "the model has no experts", "Leave the key out")
    longest = hf.get("max_position_embeddings", c.rollout.max_tokens)
    if c.rollout.max_tokens > longest:
        raise ConfigError("rollout.max_tokens", c.rollout.max_tokens, f"the model reads at most {longest} tokens", "Lower it")


def _fill(c: Config) -> None:
    """A micro-batch is filled up to a whole share for every rank that splits its tokens."""
    n, tokens = c.layout, max(c.batch.token_budget, c.rollout.max_tokens)
    parts = token_multiple(c.precision.fp8, n.tp, n.cp, n.sp)
    if n.cp > 1 and parts > tokens:
        most = max(1, tokens // token_multiple(c.precision.fp8, n.tp, 1, n.sp))
        raise ConfigError("learner.cp", n.cp, f"a micro-batch of at most {tokens} tokens would be filled up to {parts}, mostly padding",
                          f"Use learner.cp={most} or less")  # fmt: skip


def check_model(c: Config) -> None:
    """Holds the files of ``model.path`` and ``teacher.path`` against what their configs imply, without reading the tensors.

    Raises ConfigError for a tensor too many, too few or of the wrong shape, and for a file that is cut off or missing.
    """
    from ckpt_convert.families import family_of
    from ckpt_convert.hfconfig import read_json
    from ckpt_convert.source import SafetensorsSource, check_source

    for name, path in (("model.path", c.model.path), ("teacher.path", c.teacher.path)):
        root = Path(path)
        try:
            if path and is_mcore(root):
                read_meta(root)
            elif path:
                check_source(family_of(read_json(root / "config.json")), SafetensorsSource(root))
        except ConvertError as e:
            raise ConfigError(name, path, str(e), NOTHING) from e
