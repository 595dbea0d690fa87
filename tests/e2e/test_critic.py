"""Runs with a critic (M24): of its own or on the policy's backbone, resumed with the same bits, and switched off."""

import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ckpt_convert.mcore_folder import TENSORS
from mcore_agent.config import load_config
from mcore_agent.critic import critic_of
from mcore_agent.policy import Policy
from tests.e2e.running import QUICKSTART, ROOT, TINY, Shell, metrics, train
from tests.fakes import hop_tokenizer

STAGES = "stages=[{kind: sft, steps: 2, lr: 2.0e-3, demos: 16}, {kind: rl, steps: 4, lr: 1.0e-3}]"
COMMON = (STAGES, "run.save_every=1", "run.eval_tasks=0")
MODES = {
    "separate": ("critic.mode=separate", "critic.warmup=2", "critic.lr=3.0e-3", "batch.minibatches=1", "learner.tp=2"),
    "shared": ("critic.mode=shared", "critic.coef=0.1", "critic.clip=0.2"),
}
WARM = (3, 4)  # the first steps of the rl stage


def words_of(mode: str) -> tuple[str, ...]:
    return ("credit=[{name: gae, lam: 0.9}]", *MODES[mode], *COMMON)


@pytest.fixture(scope="module")
def shell():
    process = Shell()
    yield process
    process.close()


def run(shell: Shell, folder: Path, *words: str) -> Path:
    code, out = shell(train(folder, *words))
    assert code == 0, out
    return folder


@pytest.fixture(scope="module")
def whole(shell, tmp_path_factory) -> dict[str, Path]:
    """A finished run of each mode, with the checkpoint of every step."""
    root = tmp_path_factory.mktemp("critic")
    return {mode: run(shell, root / mode, *words_of(mode)) for mode in MODES}


def facts(folder: Path) -> list[dict]:
    """Every number of every step that is not a time, a size of memory, or counted from the start of the process."""
    others = ("time/", "memory/", "pool/")
    return [{k: v for k, v in m.items() if not k.startswith(others) and k != "rollout/wall_s"} for m in metrics(folder)]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, whole, by name."""
    found: dict = {}
    _load_state_dict(found, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {name: value for name, value in found.items() if torch.is_tensor(value)}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors(folder).items() if not name.startswith("optimizer") and name != "step"}


def step_of(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step-{number:06d}"


def cut(source: Path, target: Path, last: int) -> Path:
    """The run folder as it was when the checkpoint of step ``last`` was the latest."""
    shutil.copytree(source, target)
    for number in range(last + 1, 7):
        shutil.rmtree(step_of(target, number))
    (target / "checkpoints" / "latest").write_text(f"step-{last:06d}")
    return target


@pytest.mark.defect("G10")
@pytest.mark.parametrize(("mode", "parts"), [("separate", (TENSORS, "critic")), ("shared", (TENSORS,))])
def test_resumed_gives_the_same_bits(shell, whole, tmp_path, mode, parts):
    """Weights, optimizer and step count of the critic come back too: all numbers and tensors of the steps that follow."""
    folder = run(shell, cut(whole[mode], tmp_path / "again", 4), *words_of(mode))
    assert facts(folder) == facts(whole[mode])
    for part in parts:
        a, b = (tensors(step_of(f, 6) / part) for f in (folder, whole[mode]))
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert a["optimizer.state.exp_avg.value_head.weight"].any()  # of the last part: the one with the critic


def test_a_separate_critic_learns_first_and_alone(whole):
    """M24: at first it says 0; in the warm-up the policy keeps every bit of its weights; then both learn."""
    folder = whole["separate"]
    rl = [m for m in facts(folder) if m["stage"] == "rl"]
    assert rl[0]["critic/value"] == 0 and rl[0]["critic/loss"] > 0
    assert [m["optimizer_steps"] for m in rl] == [0, 0, 1, 1] and [m["critic/optimizer_steps"] for m in rl] == [1] * 4
    assert [m["version"] for m in rl] == [2, 2, 3, 4]
    assert all(m["critic/grad_norm"] > 0 and m["critic/value"] != 0 and m["critic/value_error"] > 0 for m in rl[1:])
    assert all(m["mismatch/logp_abs_max"] >= 0 for m in rl)  # measured in the warm-up too
    before = weights(step_of(folder, 2) / TENSORS)
    for number in WARM:
        now = weights(step_of(folder, number) / TENSORS)
        assert now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in now)
    now = weights(step_of(folder, 5) / TENSORS)
    assert not any(torch.equal(now[name], before[name]) for name in now)


def test_a_separate_critic_comes_from_the_policy_that_begins_to_learn(whole):
    """Its backbone is one step of AdamW at lr 3e-3 away from the imitation-trained policy's, its head from 0."""
    folder = whole["separate"]
    policy, critic = weights(step_of(folder, 2) / TENSORS), weights(step_of(folder, 3) / "critic")
    assert critic.keys() - policy.keys() == {"value_head.weight", "value_head.bias"}
    for name, value in critic.items():
        start = policy.get(name, torch.zeros_like(value))
        assert (value - start).abs().max() <= 3.01e-3, name
    assert critic["value_head.weight"].any()


def test_a_shared_critic_is_part_of_the_policy(whole):
    rl = [m for m in facts(whole["shared"]) if m["stage"] == "rl"]
    assert all(m["critic/loss"] > 0 and m["critic/value_error"] > 0 for m in rl) and rl[-1]["critic/value"] != 0
    assert not any("loss/value" in name for m in rl for name in m)
    assert not (step_of(whole["shared"], 6) / "critic").exists()
    held = weights(step_of(whole["shared"], 6) / TENSORS)
    assert held["value_head.weight"].any() and not weights(step_of(whole["shared"], 2) / TENSORS)["value_head.weight"].any()


@pytest.mark.parametrize("mode", ["off", *MODES])
def test_all_learners_take_turns_with_the_engine(mode):
    """While the engine serves, a separate critic sleeps as the policy does; off, there is none."""
    words = ["learner.tp=1", *((w for w in words_of(mode) if "tp=" not in w) if mode in MODES else ())]
    config = load_config(ROOT / QUICKSTART, words, [ROOT / TINY[1]])
    with ExitStack() as stack:
        policy = Policy(config, stack)
        critic = critic_of(config, policy)
        assert (critic is None, list(policy.learners)) == (mode == "off", [TENSORS, "critic"] if mode == "separate" else [TENSORS])
        policy.start()
        if critic:
            critic.start()
        policy.serving.open(hop_tokenizer())
        policy.serve()
        assert {learner.offload.state for learner in policy.learners.values()} == {"ASLEEP"}
        policy.train_mode()
        assert {learner.offload.state for learner in policy.learners.values()} == {"AWAKE"}


def test_off_is_a_run_without_the_key(shell, tmp_path):
    """M24: no number differs, nothing is kept of a critic."""
    folders = [run(shell, tmp_path / name, *COMMON, *words) for name, words in {"plain": (), "off": ("critic.mode=off",)}.items()]
    assert facts(folders[0]) == facts(folders[1])
    assert not any(name.startswith("critic/") for m in metrics(folders[1]) for name in m)
    assert not (step_of(folders[1], 6) / "critic").exists()
    plain, off = (tensors(step_of(f, 6) / TENSORS) for f in folders)
    assert plain.keys() == off.keys() and all(torch.equal(plain[name], off[name]) for name in plain)
    assert not any("value_head" in name for name in off)


@pytest.mark.parametrize("mode", ["separate", "shared"])
def test_values_that_know_the_action_learn_at_the_ends_of_turns(shell, tmp_path, mode):
    """M96: one number for each turn, of which there are fewer than tokens."""
    words = ("credit=[{name: sapo}, {name: standardize}]", f"critic.mode={mode}", "batch.minibatches=1", *COMMON)
    folder = run(shell, tmp_path / mode, *words, *(("critic.detach=true",) if mode == "shared" else ("critic.lr=3.0e-3",)))
    rl = [m for m in facts(folder) if m["stage"] == "rl"]
    assert len(rl) == 4 and all(np.isfinite(m["critic/value_error"]) for m in rl)
    assert rl[0]["critic/value"] == 0 and all(m["critic/value"] != 0 for m in rl[1:])
    with np.load(folder / "batch.npz") as saved:
        columns = {name.removeprefix("column/"): saved[name] for name in saved.files if name.startswith("column/")}
    assert mode == "separate" or 0 < columns["mask:turn_end"].sum() < columns["mask:pg"].sum()
