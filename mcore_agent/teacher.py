"""A frozen model that the policy is distilled from, in the learner's layout (M104; GKD, 2306.13649 sec. 3)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_convert.hfconfig import read_json
from ckpt_convert.source import SafetensorsSource
from mcore_agent.agent.tokenizer import TokenizerError, load_tokenizer
from mcore_agent.batch.plan import split
from mcore_agent.batch.rowset import rowset
from mcore_agent.batch.teacher import teacher_columns
from mcore_agent.config import Config, ConfigError
from mcore_agent.learner.learner import Learner, OptimSpec
from mcore_agent.learner.moe_losses import RouterLosses
from mcore_agent.learner.rescore import Rescorer
from mcore_agent.loss.derived import taught, top_k_needed
from mcore_agent.policy import Policy
from mcore_agent.precision import PrecisionSpec
from mcore_agent.protocols import LossTerm
from mcore_agent.types import Batch


def teacher_of(config: Config, policy: Policy) -> "Teacher | None":
    """None, and nothing allocated, without ``teacher.path``. Collective."""
    return Teacher(config, policy) if config.teacher.path else None


class Teacher:
    """Methods are collective unless they say otherwise. It is part of no checkpoint, and away from the device but for its passes.

    Its weights are those of the Hugging Face folder ``teacher.path``, its temperature is that of sampling, and its products are
    in ``precision.dtype``, also where the policy's are in FP8.
    """

    def __init__(self, config: Config, policy: Policy):
        c = config
        self.policy, self.path, self.budget, self.dp = policy, Path(c.teacher.path), c.batch.token_budget, c.learner.dp
        setup = replace(
            policy.setup, head="lm", recompute="off", precision=PrecisionSpec(c.precision.dtype), detach_value=False, losses=RouterLosses()
        )
        # the optimizer, of which a learner cannot be without, never takes a step and never has state
        optim = OptimSpec(name="sgd", momentum=0.0, nesterov=False)
        hf_config = read_json(self.path / "config.json")
        self.learner = Learner(hf_config, policy.groups, c.precision.dtype, optim, c.rollout.temperature, setup)
        self.learner.load_weights(SafetensorsSource(self.path))
        self.learner.offload.sleep()
        self.rescorer = Rescorer(self.learner, policy.line, c.batch.token_budget)

    def check(self, tokenizer: Any) -> None:
        """Rank 0. Raises ConfigError unless the teacher's tokenizer has the tokens of the policy's, under the same numbers."""
        try:
            theirs, ours = load_tokenizer(self.path).get_vocab(), tokenizer.get_vocab()
        except TokenizerError as e:
            raise ConfigError("teacher.path", str(self.path), str(e), "A teacher reads the policy's tokens") from e
        if theirs == ours:
            return
        token = min((t for t in {**theirs, **ours} if theirs.get(t) != ours.get(t)), key=lambda t: (ours.get(t, len(ours)), t))
        raise ConfigError("teacher.path", str(self.path),
                          f"its tokenizer, of {len(theirs)} tokens, is not the policy's, of {len(ours)}: {token!r} has the number "
                          f"{theirs.get(token)} there and {ours.get(token)} here", "Choose one with the policy's tokenizer")  # fmt: skip

    def columns(self, batch: Batch | None, terms: Sequence[LossTerm]) -> Batch | None:
        """Rank 0: the batch with what active ``terms`` need of the teacher; None elsewhere. Nothing is computed for other terms."""
        if not taught(terms):
            return batch
        top_k = top_k_needed(terms)
        plan = None
        if batch is not None:  # without its columns: experts to replay are the policy's
            plan = split(rowset(Batch(batch.episodes)), self.budget, self.dp)
        self.policy.train_mode()
        with self.learner.offload.parameters():
            found = self.rescorer.outputs(plan, ("top_ids", "top_logp") if top_k else (), top_k=top_k)
        if batch is None or plan is None or found is None:
            return None
        return batch.with_columns(**teacher_columns(batch, plan, found, top_k))
