"""The critic says what states are worth (M24): by a model of its own, or by a head on the policy's."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ckpt_convert.mcore_folder import CRITIC
from mcore_agent.batch.microbatch import Plan
from mcore_agent.config import Config
from mcore_agent.credit.pipeline import Pipeline
from mcore_agent.learner.learner import Learner
from mcore_agent.learner.rescore import Rescorer
from mcore_agent.learner.value import NAME as VALUE_HEAD
from mcore_agent.loss.derived import BEHIND
from mcore_agent.policy import Parts, Policy, optimizer_of
from mcore_agent.protocols import LossTerm
from mcore_agent.registry import create

PARTS = {"_loss": "loss", "": "value", "_error": "value_error"}
METRICS = {f"{term}{part}": name for term in ("value", "turn_value") for part, name in PARTS.items()}


def critic_of(config: Config, policy: Policy) -> "Critic | None":
    """None, and nothing allocated, when the critic is off. Collective."""
    return None if config.critic.mode == "off" else Critic(config, policy)


def value_term(config: Config) -> LossTerm:
    """The loss of the values that the estimator needs: those before every token, or those behind the last of a turn."""
    name = "turn_value" if BEHIND in Pipeline(config.credit).needs else "value_mse"
    return create("loss", {"name": name, "coef": config.critic.coef, "clip": config.critic.clip or None})


class Critic:
    """Methods are collective. ``own`` is the learner of a separate critic; a shared one trains with the policy's.

    ``column`` is what its values are called in a batch.
    """

    def __init__(self, config: Config, policy: Policy):
        c = config.critic
        self.policy, self.warmup, self.lr = policy, c.warmup, c.lr
        self.term = value_term(config)
        self.column = BEHIND if BEHIND in self.term.needs else "values"
        self.own: Learner | None = None
        self.rescorer = policy.rescorer
        if c.mode == "separate":
            setup = replace(policy.setup, head="value")
            self.own = Learner(policy.hf_config, policy.groups, config.precision.dtype, optimizer_of(config), setup=setup)
            self.rescorer = Rescorer(self.own, policy.line, config.batch.token_budget)
            policy.learners[CRITIC] = self.own

    def start(self) -> None:
        """A separate critic gets the policy's present backbone, a head that says 0 of every state, and a fresh optimizer."""
        if self.own is None:
            return
        self.policy.train_mode()
        weights = self.policy.learner.model.parameters()
        with torch.no_grad():
            for name, parameter in self.own.model.parameters().items():
                if name.startswith(VALUE_HEAD):
                    parameter.zero_()
                else:
                    parameter.copy_(weights[name])
        self.own.reset_optimizer()

    def begin(self, first: bool) -> None:
        """A stage begins: the ``first`` in which it learns takes it from the policy, a later one only restarts its optimizer."""
        if first:
            self.start()
        elif self.own is not None:
            self.policy.train_mode()
            self.own.reset_optimizer()

    def roles(self, terms: Sequence[LossTerm], done: int) -> dict[str, list[LossTerm]]:
        """Who learns what in the stage's step number ``done`` (from 1); the policy's own ``terms`` under ``train``."""
        if self.own is None:
            return {"train": [*terms, self.term]}
        warm = {} if done <= self.warmup else {"train": [*terms]}
        return {"critic": [self.term], **warm}

    def values(self, plan: Plan | None) -> list[list[np.ndarray]] | None:
        """Rank 0 gives a plan and gets ``[dp rank][slot]`` values, each [T]: of the states that tokens were drawn in, or led to."""
        self.policy.train_mode()
        name = "value_behind" if self.column == BEHIND else "value"
        found = self.rescorer.outputs(plan, report=(name,))
        return None if found is None else [[out[name] for out in rank] for rank in found]

    def update(self, parts: Parts, lr: float, numbers: dict[str, Any]) -> None:
        """An optimizer step of a separate critic for each of its parts; what was learned of values, by name ``critic/…``."""
        if self.own is not None:
            stats = [self.policy.step(self.own, micro, [self.term], lr) for role, micro in parts if role == "critic"]
            numbers["critic/optimizer_steps"] = sum(s.applied for s in stats)
            numbers["critic/skipped_not_finite"] = sum(not s.applied for s in stats)
            if stats:
                numbers["critic/lr"], numbers["critic/grad_norm"] = lr, stats[-1].grad_norm
                numbers |= {f"critic/{METRICS.get(name, name)}": value for name, value in stats[-1].metrics.items()}
            return
        for metric, name in METRICS.items():  # the policy's step has measured them
            if (found := numbers.pop(f"loss/{metric}", None)) is not None:
                numbers[f"critic/{name}"] = found
