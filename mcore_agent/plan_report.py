"""What ``mcore-agent check`` prints: the resolved plan of a run, made from the configuration alone."""

import dataclasses
import math
from collections.abc import Iterator

from ckpt_convert.families import family_of
from mcore_agent import memory_plan
from mcore_agent.config import Config, threads_per_rank
from mcore_agent.config_rules import hf_config_of
from mcore_agent.credit.pipeline import Pipeline
from mcore_agent.precision import GpuType, planned
from mcore_agent.registry import create

UTILIZATION = 0.4  # of a GPU's peak, an assumption: table 5 of 2205.05198 has 0.42 to 0.56 for dense models


def report(config: Config, gpu: str | None = None) -> str:
    """Lines ``key: value`` in sections; everything in it is derived, nothing is started. ``gpu``: plan for this type.

    Raises ConfigError for an unknown GPU. Whether it can run there ``load_config`` says.
    """
    sections = [("model", _model), ("ranks", _ranks), ("step", _step), ("stages", _stages), ("parts", _parts)]
    written = [(title, list(section(config))) for title, section in sections]
    kind = planned(gpu).gpu if gpu else None
    written.insert(3, (f"memory of each {kind.name} GPU" if kind else "memory of each rank", list(_memory(config, kind))))
    written.insert(4, ("work of a step", list(_work(config, kind))))
    return "\n".join(line for title, rows in written for line in (title, *(f"  {name:<22}{value}" for name, value in rows)))


def step_rows(c: Config) -> int:
    """Rows of the largest optimizer step, of all ranks; a step of the rl stages has whole groups."""
    groups = math.ceil(c.rollout.prompts / c.batch.minibatches)
    return max(stage.demos if stage.kind == "sft" else groups * c.rollout.group_size for stage in c.stages)


def shape_of(c: Config) -> memory_plan.Shape:
    """What of a configuration decides memory; rows and micro-batches are as full as they may be."""
    tokens, micro_batches = memory_plan.fill(step_rows(c), c.rollout.max_tokens, c.batch.token_budget, c.layout.dp)
    return memory_plan.Shape(
        **dataclasses.asdict(c.layout),
        dtype=c.precision.dtype,
        optimizer=c.learner.optimizer,
        recompute=c.learner.recompute,
        tokens=tokens,
        micro_batches=micro_batches,
        fp8=c.precision.fp8,
        fp8_edge_bf16=c.precision.fp8_edge_bf16,
        fp8_params=c.precision.fp8_params,
        offload=c.learner.offload,
        async_save=c.run.async_save,
    )


def _memory(c: Config, gpu: GpuType | None) -> Iterator[tuple[str, str]]:
    """Marked with ~: estimates. Training and rollout take turns, so that activations and the engine do not meet."""
    family, shape = family_of(hf_config_of(c)), shape_of(c)
    stages = memory_plan.plan(family, shape, gpu is not None, critic=c.critic.mode == "separate")
    for stage in stages:
        parts = [
            ("weights ", stage.state.weights),
            ("gradients ", stage.state.gradients),
            ("optimizer ", stage.state.optimizer),
            ("separate critic ~", stage.critic.total),
            ("FP8 weights ~", stage.fp8_copies),
            (f"activations (recompute {shape.recompute}) ~", stage.activations),
            ("CUDA and NCCL ~", stage.communication),
        ]
        text = ", ".join(name + size(value) for name, value in parts if value)
        host = [f"~{size(stage.host)} of optimizer"] if stage.host else []
        host += [f"~{size(stage.copies)} of copies while a checkpoint is written"] if stage.copies else []
        text += f"; in host memory {' and '.join(host)}" if host else ""
        yield (f"stage {stage.stage + 1} of {shape.pp}" if shape.pp > 1 else "training"), f"~{size(stage.total)}: {text}"
    rows = min(c.rollout.prompts * c.rollout.group_size, c.rollout.max_batch)
    weights = memory_plan.engine_weights(family, shape.dtype)
    cache = memory_plan.kv_bytes(family.arch, rows * c.rollout.max_tokens, shape.dtype)
    resting = stages[0].resting
    yield (
        "rollout, on rank 0",
        (
            f"~{size(resting + weights + cache)}: what of the above stays, engine weights {size(weights)}, keys and values {size(cache)} "
            f"for {rows} rows of {c.rollout.max_tokens:,}"
        ),
    )
    if gpu is not None:
        most = max(resting + weights + cache, *(stage.total for stage in stages))
        verdict = "fits" if most <= gpu.memory else "does not fit; raise tp, pp or dp, or lower batch.token_budget"
        yield "fullest", f"~{size(most)} of {size(gpu.memory)}: {verdict}"


def _work(c: Config, gpu: GpuType | None) -> Iterator[tuple[str, str]]:
    shape, arch = shape_of(c), family_of(hf_config_of(c)).arch
    row = c.rollout.max_tokens
    work = memory_plan.flops(arch, c.rollout.prompts * c.rollout.group_size * row, row, shape.recompute)
    yield (
        "training FLOPs",
        (f"{work.training:.3g} at most = forward {work.forward:.3g} + backward {work.backward:.3g} + recompute {work.recompute:.3g}"),
    )
    yield "scoring FLOPs", f"{work.forward:.3g} at most, for each pass without gradients"
    if gpu is not None:
        peak = gpu.bf16 * shape.world
        yield (
            "training time",
            (f"{work.training / (UTILIZATION * peak):.3g} s at most, at {UTILIZATION:.0%} of the bf16 peak of {shape.world} {gpu.name}"),
        )


def size(count: float) -> str:
    """Bytes for reading: ``1536 -> '1.5 KiB'``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"


def _model(c: Config) -> Iterator[tuple[str, str]]:
    hf = hf_config_of(c)
    family = family_of(hf)
    parameters = sum(math.prod(shape) for shape in family.shapes().values())
    yield "family", family.model_type
    yield "start", c.model.path or f"random weights, tokenizer of at most {c.model.vocab} entries trained on demonstrations"
    yield "parameters", f"{parameters:,}"
    yield "precision", _precision(c)


def _precision(c: Config) -> str:
    p = c.precision
    if p.fp8 == "off":
        return p.dtype
    edges = f", {p.fp8_edge_bf16} layer{'s' * (p.fp8_edge_bf16 > 1)} at either end in {p.dtype}" if p.fp8_edge_bf16 else ""
    return f"{p.dtype}, matrix products in FP8 ({p.fp8} scaling, {p.fp8_format}){', with their weights' * p.fp8_params}{edges}"


def _ranks(c: Config) -> Iterator[tuple[str, str]]:
    n = c.layout
    extra = (f", vpp {n.vpp}" if n.vpp > 1 else "") + (", sp on" if n.sp else "")
    cp = f" x cp {n.cp}" if n.cp > 1 else ""
    experts = family_of(hf_config_of(c)).arch.experts
    etp = f" x etp {n.etp}" if n.etp != n.tp else ""
    parts = f", experts over ep {n.ep}{etp}" if experts else ""
    yield "learner ranks", f"{c.world} = tp {n.tp}{cp} x pp {n.pp} x dp {n.dp}{extra}{parts}"
    yield "threads per rank", str(threads_per_rank(c))
    yield "engine", f"{c.rollout.engine}, on rank 0, in turns with the learner"


def _step(c: Config) -> Iterator[tuple[str, str]]:
    episodes = c.rollout.prompts * c.rollout.group_size
    more = "".join(f", and a {branch} one of each task to compare with" for branch in Pipeline(c.credit).branches)
    yield "episodes", f"{episodes} = {c.rollout.prompts} tasks x {c.rollout.group_size}{more}"
    yield "tokens at most", f"{episodes * c.rollout.max_tokens:,} in rows of up to {c.rollout.max_tokens:,}"
    tokens = shape_of(c).tokens
    limit = f" (batch.token_budget={c.batch.token_budget:,} is never reached)" if tokens < c.batch.token_budget else ""
    yield "micro-batches", f"of up to {tokens:,} tokens on each of {c.learner.dp} data-parallel ranks{limit}"
    yield "optimizer steps", f"{c.batch.minibatches} per batch"


def _stages(c: Config) -> Iterator[tuple[str, str]]:
    for i, stage in enumerate(c.stages):
        until = f", until sampled success reaches {stage.until_success:g}" if stage.until_success else ""
        steps, warmup = c.steps(stage), ""
        if stage.warmup >= steps:
            reached = stage.lr * steps / stage.warmup
            warmup = f"; the warm-up of {stage.warmup} steps takes all of them, and the rate ends at {reached:g}"
        yield f"{i + 1} {stage.kind}", f"at most {steps} steps at lr {stage.lr:g} ({stage.schedule}){warmup}{until}"


def _parts(c: Config) -> Iterator[tuple[str, str]]:
    yield "environment", _call(c.env)
    yield "rewards", ", ".join(map(_call, c.reward))
    pipeline = Pipeline(c.credit)
    needs = [*(need for need in pipeline.needs if need != "logp_old"), *(("scores of its own views",) if pipeline.rescores else ())]
    yield "credit", " then ".join(map(_call, c.credit)) + (f"; needs {', '.join(needs)}" if needs else "")
    if c.critic.mode != "off":
        yield "critic", "a model of its own" if c.critic.mode == "separate" else "a head on the policy"
    for spec in c.loss:
        term = create("loss", spec)
        yield "loss", f"{_call(spec)} on channel {term.channel}; needs {', '.join(term.needs) or 'nothing more'}"


def _call(spec: dict) -> str:
    arguments = ", ".join(f"{k}={v}" for k, v in spec.items() if k != "name")
    return f"{spec['name']}({arguments})"
