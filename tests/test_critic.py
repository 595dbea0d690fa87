"""The section ``critic``: every key has an effect or is refused, and off is the default in every bit of the configuration."""

from pathlib import Path

import pytest

from mcore_agent.config import ConfigError, load_config

QUICKSTART = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
GAE = "credit=[{name: gae}]"
REFUSED = [
    ([GAE], r"critic\.mode = 'off': the estimator 'gae' needs a critic's values.*separate or shared"),
    (["critic.mode=separate"], r"critic\.mode = 'separate': the estimator 'grpo' has no use for values.*name: gae"),
    (["critic.mode=shared"], r"critic\.mode = 'shared': the estimator 'grpo' has no use"),
    (["critic.mode=both"], r"critic\.mode = 'both': not a legal value.*off, separate, shared"),
    (["critic.lr=1e-3"], r"critic\.lr = 0\.001: has no effect: critic\.mode is off"),
    (["critic.coef=1"], r"critic\.coef = 1\.0: has no effect: critic\.mode is off"),
    (["critic.clip=0.2"], r"critic\.clip = 0\.2: has no effect: critic\.mode is off"),
    (["critic.detach=true"], r"critic\.detach = True: has no effect: critic\.mode is off"),
    (["critic.warmup=3"], r"critic\.warmup = 3: has no effect: critic\.mode is off"),
    ([GAE, "critic.mode=separate", "critic.detach=true"], r"critic\.detach = True: has no effect: a separate critic has its own backbone"),
    ([GAE, "critic.mode=shared", "critic.lr=1e-3"], r"critic\.lr = 0\.001: has no effect: the policy's optimizer trains a shared critic"),
    ([GAE, "critic.mode=shared", "critic.warmup=3"], r"critic\.warmup = 3: has no effect: the policy's optimizer"),
    ([GAE, "critic.mode=separate", "critic.warmup=30"], r"critic\.warmup = 30: an rl stage has 30 steps.*at most 29"),
    ([GAE, "critic.mode=separate", "critic.coef=0"], r"critic\.coef = 0\.0: the critic would never learn"),
    ([GAE, "critic.mode=separate", "critic.clip=-1"], r"critic\.clip = -1\.0: below 0"),
    ([GAE, "critic.mode=shared", "stages=[{kind: sft, steps: 3}]"], r"critic\.mode = 'shared': there is no rl stage"),
    ([GAE, "critic.mode=shared", "loss=[{name: ppo_clip}, {name: value_mse}]"], r"loss\[1\] = .*learned by the critic's own loss"),
    (["loss=[{name: value_mse}]"], r"loss\[0\] = .*set critic\.mode"),
    (["credit=[{name: gae, lam: 2}]", "critic.mode=shared"], r"lam is 2, but must be in \[0, 1\]"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        load_config(QUICKSTART, words)


@pytest.mark.parametrize("more", ["critic.mode=separate critic.lr=1e-3 critic.warmup=29", "critic.mode=shared critic.detach=true"])
def test_accepted(more):
    assert load_config(QUICKSTART, [GAE, "critic.coef=1", "critic.clip=0.2", *more.split()]).critic.coef == 1


def test_off_is_the_default():
    assert load_config(QUICKSTART, ["critic.mode=off"]) == load_config(QUICKSTART)
