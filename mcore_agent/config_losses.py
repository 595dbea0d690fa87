"""Combinations of loss terms, critic, teacher and correction that cannot run, each refused with its reason and a way out."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from ckpt_convert.errors import ConvertError
from ckpt_convert.hfconfig import read_json
from mcore_agent.config import Config, ConfigError
from mcore_agent.config_rules import check_rules, hf_config_of, unused
from mcore_agent.credit.pipeline import Pipeline
from mcore_agent.layout import LayoutError
from mcore_agent.loss.common import LossError
from mcore_agent.loss.correction import Correction, automatic, correct, uncorrected
from mcore_agent.loss.derived import BEHIND, NOW, Marking, TopK, derive, of_teacher
from mcore_agent.registry import create
from mcore_agent.types import Batch

# Columns of a batch and outputs of a model that an rl stage gives to loss terms.
PROVIDED = frozenset(
    {"advantage", "logp_old", "logp_prox", "logp_ref", NOW, "entropy", "log_sum", "top_logp", "top_ids"}
    | {"value", "value_behind", "values", BEHIND, "returns"}
)


def check_all(config: Config, gpu: str | None = None) -> None:
    """Raises ConfigError for the first rule of all that the configuration breaks, here or on a machine with ``gpu``."""
    check_rules(config, gpu)
    for rule in (_losses, _critic, _teacher, _correction):
        rule(config)


def _losses(c: Config) -> None:
    """A term must find its tokens and its columns in an rl stage."""
    nothing = Batch((), {name: np.zeros(0) for name in PROVIDED})
    for i, spec in enumerate(c.loss):
        term = replace(create("loss", spec), coef=1.0)  # one that is switched off may be switched on
        if term.channel != "pg" and not isinstance(term, Marking):
            raise ConfigError(f"loss[{i}]", spec, f"learns from the channel {term.channel!r}, in which an rl stage has no token",
                              "Remove the term")  # fmt: skip
        try:
            found = PROVIDED | derive(nothing, [term]).columns.keys()
        except LossError as e:
            raise ConfigError(f"loss[{i}]", spec, str(e), "No stage of a run provides it; remove the term") from e
        if any(of_teacher(name) for name in term.needs) and not c.teacher.path:
            raise ConfigError(f"loss[{i}]", spec, "needs a teacher", "Give teacher.path, the Hugging Face folder of one")
        if isinstance(term, TopK) and term.top_k > hf_config_of(c)["vocab_size"]:
            raise ConfigError(f"loss[{i}]", spec, f"the vocabulary has {hf_config_of(c)['vocab_size']} tokens", "Lower top_k")
        if missing := [name for name in term.needs if name not in found and not of_teacher(name)]:
            raise ConfigError(f"loss[{i}]", spec, f"needs {missing[0]!r}", "No stage of a run provides it; remove the term")


def _critic(c: Config) -> None:
    """The critic serves an estimator: each needs the other."""
    critic, rl = c.critic, [stage for stage in c.stages if stage.kind == "rl"]
    estimator = Pipeline(c.credit).estimator
    name, worth = estimator.registered_name, {"values", BEHIND}
    for i, term in enumerate(c.loss):
        if {"value", "value_behind"} & set(create("loss", term).needs):
            raise ConfigError(f"loss[{i}]", term, "values are learned by the critic's own loss", "Remove it and set critic.mode")
    if critic.mode == "off":
        if worth & set(estimator.needs):
            raise ConfigError("critic.mode", "off", f"the estimator {name!r} needs a critic's values",
                              "Set critic.mode to separate or shared, or choose another estimator")  # fmt: skip
        unused(c, "critic.mode is off", *(f"critic.{key}" for key in ("lr", "coef", "clip", "detach", "warmup")))
        return
    if not worth & set(estimator.needs) or "returns" not in estimator.gives:
        raise ConfigError("critic.mode", critic.mode, f"the estimator {name!r} has no use for values",
                          "Choose one that has, for example credit: [{name: gae}], or set critic.mode to off")  # fmt: skip
    if not rl:
        raise ConfigError("critic.mode", critic.mode, "there is no rl stage to learn values in", "Set critic.mode to off")
    if critic.coef == 0:
        raise ConfigError("critic.coef", 0.0, "the critic would never learn", "Give a value above 0, for example 0.5")
    if critic.mode == "shared":
        unused(c, "the policy's optimizer trains a shared critic", "critic.lr", "critic.warmup")
    else:
        unused(c, "a separate critic has its own backbone", "critic.detach")
    shortest = min(c.steps(stage) for stage in rl)
    if critic.warmup >= shortest:
        raise ConfigError("critic.warmup", critic.warmup, f"an rl stage has {shortest} steps, and would never train its policy",
                          f"Give at most {shortest - 1}")  # fmt: skip


def _teacher(c: Config) -> None:
    """A teacher serves a loss term, speaks of the policy's tokens, and can be split as the policy is."""
    path = c.teacher.path
    terms = [create("loss", spec) for spec in c.loss] if any(stage.kind == "rl" for stage in c.stages) else []
    if not any(of_teacher(name) for term in terms for name in term.needs):
        unused(c, "no loss term of an rl stage learns from a teacher", "teacher.path")
    if not path:
        return
    from ckpt_convert.families import family_of

    if not (Path(path) / "config.json").is_file():
        way_out = "Give an export (run.export), or what python -m ckpt_convert makes of a Megatron checkpoint"
        raise ConfigError("teacher.path", path, "no Hugging Face folder", way_out)
    try:
        hf, n = read_json(Path(path) / "config.json"), c.layout
        family = family_of(hf)
        family.check_layout(tp=n.tp, pp=n.pp, ep=n.ep, vpp=n.vpp, etp=n.etp)
        n.check_experts(family.arch.experts)
    except (ConvertError, LayoutError) as e:
        raise ConfigError("teacher.path", path, str(e), "Choose a teacher that can be split as the policy is") from e
    own = hf_config_of(c)["vocab_size"]
    if family.arch.vocab != own:
        raise ConfigError("teacher.path", path, f"its vocabulary has {family.arch.vocab} tokens, the policy's {own}",
                          "Choose a teacher with the policy's tokenizer")  # fmt: skip
    if family.arch.head_dim % 2:
        raise ConfigError("teacher.path", path, f"head_dim {family.arch.head_dim} is odd", "Choose another teacher")
    longest = hf.get("max_position_embeddings", c.rollout.max_tokens)
    if c.rollout.max_tokens > longest:
        raise ConfigError("teacher.path", path, f"it reads at most {longest} of the {c.rollout.max_tokens} tokens of rollout.max_tokens",
                          "Lower that, or choose another teacher")  # fmt: skip


def correction_of(c: Config) -> Correction | None:
    """What ``correction`` asks for. Raises LossError for a band that cannot be."""
    from ckpt_convert.families import family_of

    o = c.correction
    if o.treatment == "off":
        return None
    if o.treatment == "auto":
        hf = hf_config_of(c)
        found = automatic(moe=bool(family_of(hf).arch.experts), max_lag=c.rollout.max_lag, quantized=c.rollout.fp8 != "off")
        return found and Correction(level=o.level, high=o.high)  # type: ignore[arg-type]
    return Correction(o.treatment, o.level, o.low, o.high)  # type: ignore[arg-type]


def _correction(c: Config) -> None:
    o = c.correction
    try:
        correction = correction_of(c)
    except ValueError as e:
        raise ConfigError("correction", o.treatment, str(e), "Widen the band") from e
    if correction is None:
        unused(c, "no correction is on", "correction.level", "correction.low", "correction.high")
    elif correction.treatment == "truncate":
        unused(c, "truncate bounds from above only", "correction.low")
    if not any(stage.kind == "rl" for stage in c.stages):
        return
    terms = correct([create("loss", spec) for spec in c.loss], correction)
    if found := uncorrected([term.needs for term in terms], c.rollout.max_lag):
        raise ConfigError("correction.treatment", o.treatment, *found)
    if o.max_age > c.rollout.max_lag:
        raise ConfigError("correction.max_age", o.max_age, f"no token is older than rollout.max_lag = {c.rollout.max_lag}",
                          "Lower it or leave it out")  # fmt: skip
