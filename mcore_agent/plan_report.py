"""What ``mcore-agent check`` prints: the resolved plan of a run, made from the configuration alone."""

import math
from collections.abc import Iterator

from ckpt_convert.families import family_of
from mcore_agent.config import Config, threads_per_rank
from mcore_agent.config_rules import hf_config_of
from mcore_agent.registry import create


def report(config: Config) -> str:
    """Lines ``key: value`` in sections; everything in it is derived, nothing is started."""
    lines = []
    for title, section in (("model", _model), ("ranks", _ranks), ("step", _step), ("stages", _stages), ("parts", _parts)):
        lines.append(title)
        lines += [f"  {name:<22}{value}" for name, value in section(config)]
    return "\n".join(lines)


def _model(c: Config) -> Iterator[tuple[str, str]]:
    hf = hf_config_of(c)
    family = family_of(hf)
    parameters = sum(math.prod(shape) for shape in family.shapes().values())
    yield "family", family.model_type
    yield "start", c.model.path or f"random weights, tokenizer of at most {c.model.vocab} entries trained on demonstrations"
    yield "parameters", f"{parameters:,}"
    yield "precision", c.precision.dtype


def _ranks(c: Config) -> Iterator[tuple[str, str]]:
    layout = c.learner
    yield "learner ranks", f"{c.world} = tp {layout.tp} x pp {layout.pp} x dp {layout.dp}, experts over ep {layout.ep}"
    yield "threads per rank", str(threads_per_rank(c))
    yield "engine", f"{c.rollout.engine}, on rank 0, in turns with the learner"


def _step(c: Config) -> Iterator[tuple[str, str]]:
    episodes = c.rollout.prompts * c.rollout.group_size
    yield "episodes", f"{episodes} = {c.rollout.prompts} tasks x {c.rollout.group_size}"
    yield "tokens at most", f"{episodes * c.rollout.max_tokens:,} in rows of up to {c.rollout.max_tokens:,}"
    yield "micro-batches", f"of up to {c.batch.token_budget:,} tokens on each of {c.learner.dp} data-parallel ranks"
    yield "optimizer steps", f"{c.batch.minibatches} per batch"


def _stages(c: Config) -> Iterator[tuple[str, str]]:
    for i, stage in enumerate(c.stages):
        until = f", until sampled success reaches {stage.until_success:g}" if stage.until_success else ""
        yield f"{i + 1} {stage.kind}", f"at most {c.steps(stage)} steps at lr {stage.lr:g} ({stage.schedule}){until}"


def _parts(c: Config) -> Iterator[tuple[str, str]]:
    yield "environment", _call(c.env)
    yield "rewards", ", ".join(map(_call, c.reward))
    yield "credit", " then ".join(map(_call, c.credit))
    for spec in c.loss:
        term = create("loss", spec)
        yield "loss", f"{_call(spec)} on channel {term.channel}; needs {', '.join(term.needs) or 'nothing more'}"


def _call(spec: dict) -> str:
    arguments = ", ".join(f"{k}={v}" for k, v in spec.items() if k != "name")
    return f"{spec['name']}({arguments})"
