"""The ring: task, rollout, reward, credit, batch, update, publish. Every rank runs this file.

Rank 0 plays and scores; the other ranks wait for their rows, polling, never inside a collective.
"""

from pathlib import Path
from typing import Any

from mcore_agent.config import Config
from mcore_agent.session import open_session


def train(config: Config, folder: Path, started: float) -> dict[str, Any]:
    """Runs, or resumes, every stage of the recipe in ``folder``; returns what ``summary.json`` holds.

    ``started`` is when the command began (seconds since the epoch). Raises what a stage raises; the last complete
    checkpoint stays.
    """
    with open_session(config, folder, started) as s:
        for stage, step in s.schedule():
            if stage.kind == "rl":
                episodes = s.collect(step)
                episodes = s.reward(episodes)
                batch = s.credit(episodes)
            else:
                batch = s.imitate(stage, step)
            parts = s.split(stage, batch)
            s.update(stage, step, parts)
            s.publish(stage, step)
            s.evaluate(stage, step)
            s.log(stage, step)
            s.save(stage, step)
        return s.finish()
