"""Variants are found by folder and made from a recipe's keys; a wrong key is refused with the nearest right one."""

import subprocess
import sys
from pathlib import Path

import pytest

import mcore_agent
from mcore_agent import registry
from mcore_agent.registry import RegistryError

PURE_KINDS = ("reward", "estimator", "transform", "loss", "aggregation")


def test_the_variants_of_a_folder_are_found_without_a_list():
    assert set(registry.variants("loss")) >= {"ppo_clip", "k3_kl", "sft_nll", "entropy_bonus"}
    assert set(registry.variants("aggregation")) >= {"token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "episode_mean"}
    assert set(registry.variants("estimator")) >= {"grpo"}
    assert set(registry.variants("reward")) >= {"outcome", "overlong"}


def test_a_variant_is_made_from_its_keys():
    made = registry.create("estimator", {"name": "grpo", "sigma": "sample", "eps": 0})
    assert (made.sigma, made.eps) == ("sample", 0)
    assert made == registry.get("estimator", "grpo")(sigma="sample", eps=0)
    assert registry.create("loss", {"name": "ppo_clip", "dual_clip": None}).dual_clip is None


@pytest.mark.parametrize(
    ("kind", "spec", "says"),
    [
        ("los", {"name": "ppo_clip"}, "no kind 'los'"),
        ("loss", {}, "a loss needs the key 'name'; known: .*ppo_clip"),
        ("loss", {"name": "ppo_clp"}, "no loss 'ppo_clp'; did you mean 'ppo_clip'"),
        ("loss", {"name": "ppo_clip", "clip_hihg": 0.3}, "takes no 'clip_hihg'; did you mean 'clip_high'"),
        ("loss", {"name": "ppo_clip", "clip_high": "0.3"}, "clip_high is '0.3', but must be float"),
        ("loss", {"name": "ppo_clip", "channel": "sft"}, "takes no 'channel'"),
        ("estimator", {"name": "grpo", "sigma": "both"}, "sigma is 'both', but must be .*population"),
        ("reward", {"name": "overlong", "limit": 20}, "reward 'overlong' needs 'cache'"),
        ("reward", {"name": "overlong", "limit": True, "cache": 4}, "limit is True, but must be int"),
    ],
)
def test_a_wrong_specification_is_refused_by_name(kind, spec, says):
    with pytest.raises(RegistryError, match=says):
        registry.create(kind, spec)


def test_a_name_is_given_only_once():
    with pytest.raises(RegistryError, match="estimator 'grpo' is defined twice"):

        @registry.register("estimator", "grpo")  # fmt: skip
        class Other:
            pass

    assert registry.get("estimator", "grpo").__module__ == "mcore_agent.credit.grpo"


def test_nobody_outside_its_folder_tests_for_a_variant():
    """A stage that compares a name with a variant's would be a second registry."""
    root = Path(mcore_agent.__file__).parent
    for kind in PURE_KINDS:
        home = root / registry.FOLDERS[kind].split(".")[-1]
        for path in root.rglob("*.py"):
            if home in path.parents:
                continue
            text = path.read_text()
            for name in registry.variants(kind):
                for way in (f'== "{name}"', f'!= "{name}"', f'case "{name}"', f'in ("{name}"'):
                    assert way not in text, f"{path} tests for the {kind} {name!r}"


def test_estimators_and_rewards_are_listed_without_torch():
    code = "import sys; from mcore_agent import registry; registry.variants('estimator'); registry.variants('reward');" \
           "import mcore_agent.credit.pipeline, mcore_agent.reward.pipeline; sys.exit('torch' in sys.modules)"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
