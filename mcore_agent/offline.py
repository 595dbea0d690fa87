"""What needs a model but no training: the loss of a saved batch, evaluation, and episodes to look at."""

from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ckpt_convert.mcore_folder import HF
from mcore_agent.batch.plan import split
from mcore_agent.batch.rowset import RowSet
from mcore_agent.config import Config
from mcore_agent.critic import value_term
from mcore_agent.lead import Lead
from mcore_agent.policy import Policy
from mcore_agent.registry import create
from mcore_agent.types import Episode

COLOURS = {"prompt": "dim", "obs": "cyan", "action": "green", "answer": "bold green", "forced": "yellow"}


def print_loss(config: Config, checkpoint: Path, batch: Path) -> int:
    """Prints the loss of the recipe's terms on a saved batch at a checkpoint's weights, under this recipe's layout."""
    with ExitStack() as stack:
        policy = Policy(config, stack)
        policy.load_weights(checkpoint)
        terms = [create("loss", spec) for spec in config.loss]
        if config.critic.mode == "shared":  # last, as in the run that saved the batch
            terms.append(value_term(config))
        plan = split(RowSet.load(batch), config.batch.token_budget, config.learner.dp) if policy.rank == 0 else None
        ((_, micro),) = policy.deal([("train", plan)] if plan is not None else None)
        loss = policy.learner.loss(micro, terms)
        if policy.rank == 0:
            print(f"loss {loss:.10g}")
    return 0


def print_evaluation(config: Config, checkpoint: Path | None) -> int:
    """Prints greedy and sampled success over the evaluation split, every task scored once."""
    with ExitStack() as stack:
        lead = _serving(config, checkpoint, stack)
        if lead:
            entry = lead.evaluate(step=0)
            table = Table("", "success", "mean reward", "failed")
            for name in ("greedy", "sampled"):
                table.add_row(name, *(f"{entry[f'{name}_{what}']:.3f}" for what in ("success", "reward")), str(entry[f"{name}_failed"]))
            Console(highlight=False).print(table)
    return 0


def print_rollouts(config: Config, checkpoint: Path | None, count: int, greedy: bool) -> int:
    """Plays ``count`` tasks of the evaluation split and prints them; sampled text is green, observations are cyan."""
    with ExitStack() as stack:
        lead = _serving(config, checkpoint, stack)
        if lead:
            for episode in lead.scorer(lead.policy.serving.play("evaluate", 0, count, greedy))[0]:
                _print_episode(episode, lead)
    return 0


def _serving(config: Config, checkpoint: Path | None, stack: ExitStack) -> Lead | None:
    """Rank 0: a lead whose engine serves the checkpoint's weights, or the recipe's own."""
    policy = Policy(config, stack)
    files = checkpoint / HF if checkpoint else None
    if checkpoint is None:
        policy.start()
    else:
        policy.load_weights(checkpoint)
    lead = Lead(config, policy, stack, files) if policy.rank == 0 else None
    policy.serving.open(lead.tokenizer if lead else None)
    policy.serve()
    return lead


def _print_episode(episode: Episode, lead: Lead) -> None:
    console = Console(highlight=False)
    rewards = ", ".join(f"{name} {value}" for name, value in episode.rewards.items())
    console.rule(f"{episode.task.id}  {episode.status} {episode.reason}  {rewards}", align="left")
    for row in episode.rows:
        for s in row.segments:
            console.print(lead.tokenizer.decode(row.tokens[s.start : s.end].tolist()), style=COLOURS.get(s.kind, ""), end="", markup=False)
        console.print()
