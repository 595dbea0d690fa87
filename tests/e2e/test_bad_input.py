"""Bad input and bad luck: one clear line with the way out, the right exit code, nothing lost and nothing left running.

Exit codes: 2 the configuration or the input cannot run, 1 a failure, 130 an interrupt.
"""

import asyncio
import os
import random
import shutil
import signal
import socket
import struct
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_convert.mcore_folder import read_meta
from mcore_agent import cli, launch
from mcore_agent.launch import interrupts_later, run_ranks
from mcore_agent.learner.checkpoint import CheckpointError
from mcore_agent.state import Checkpoints, locked
from tests.e2e.running import QUICKSTART, SLACK, TINY, Command, Shell, end, metrics, start, train, tree, wait_for

NO_CONFIG = ("model.config={}", "model.vocab=0")
RL = "stages=[{kind: rl, steps: 8, lr: 1.0e-3}]"
BREAKABLE = "env={name: breakable, hops: 3}"


@pytest.fixture(scope="module")
def shell():
    """Runs a command in a process that has started up already."""
    process = Shell()
    yield process
    process.close()


@pytest.fixture(scope="module")
def run(shell, tmp_path_factory) -> Path:
    """A finished tiny run with its last checkpoints and its export."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, out = shell(train(folder, "run.export=true"))
    assert code == 0, out
    return folder


def last(folder: Path) -> Path:
    found = Checkpoints(folder / "checkpoints", keep=1).latest()
    assert found is not None
    return found


def whole(folder: Path, killed: bool = False) -> int:
    """The step of the latest checkpoint, which is complete and has every byte. A ``killed`` run may leave one that it was
    writing, which the next checkpoint removes."""
    read_meta(last(folder))
    assert len(list(folder.glob("checkpoints/*.partial"))) <= int(killed)
    return int(last(folder).name[-6:])


# ------------------------------------------------------------------------------------------------ refused, exit code 2


def without_tensor(hf: Path) -> None:
    tensors = load_file(hf / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, hf / "model.safetensors")


def with_tensor(hf: Path) -> None:
    save_file(load_file(hf / "model.safetensors") | {"model.layers.7.bias": torch.zeros(3)}, hf / "model.safetensors")


def shortened(name: str):
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size * 2 // 3)


def removed(name: str):
    return lambda folder: (folder / name).unlink()


def written(name: str, data: bytes):
    return lambda folder: (folder / name).write_bytes(data)


SHARD = "tensors/__0_0.distcp"
DAMAGED = {  # what is done to a model folder -> which folder it is, and what is said
    "missing tensor": ("export", without_tensor, "tensor model.layers.1.mlp.up_proj.weight is missing"),
    "extra tensor": ("export", with_tensor, "tensor model.layers.7.bias has no rule in family qwen3"),
    "cut safetensors": ("export", shortened("model.safetensors"), "model.safetensors is truncated or damaged"),
    "no safetensors": ("export", removed("model.safetensors"), "holds neither model.safetensors nor"),
    "cut config": ("export", shortened("config.json"), "config.json is not JSON"),
    "config is a list": ("export", written("config.json", b"[1]"), "config.json holds no JSON object"),
    "config is no text": ("export", written("config.json", b"\xff\xfe"), "config.json is not JSON"),
    "no tokenizer": ("export", removed("tokenizer_config.json"), "holds no tokenizer_config.json"),
    "cut tokenizer": ("export", shortened("tokenizer.json"), "the tokenizer files in"),
    "no chat template": ("export", removed("chat_template.jinja"), "has no chat template; add chat_template.jinja"),
    "half-written": ("mcore", removed("COMPLETE"), "was not written to its end (COMPLETE is missing)"),
    "missing shard": ("mcore", removed(SHARD), f"{SHARD} has no bytes, meta.json says"),
    "cut shard": ("mcore", shortened(SHARD), f"{SHARD} has "),
    "cut meta": ("mcore", shortened("meta.json"), "meta.json is not JSON"),
    "empty meta": ("mcore", written("meta.json", b'{"format": 1}'), "meta.json lacks or has too much"),
}


@pytest.fixture(scope="module")
def answers(shell, run, tmp_path_factory) -> dict[str, tuple[int, str]]:
    """What the command line says to bad input of many kinds."""
    root = tmp_path_factory.mktemp("bad")
    commands: dict[str, Command] = {}
    for name, (kind, damage, _) in DAMAGED.items():
        folder = root / name.replace(" ", "-")
        shutil.copytree(run / "export" if kind == "export" else last(run), folder)
        damage(folder)
        commands[name] = train(root / f"run-{folder.name}", *NO_CONFIG, f"model.path={folder}", RL)
    (root / "file").write_text("x")
    (root / "latin.yaml").write_bytes(b"run: {seed: 0} # caf\xe9\n")
    (root / "other").mkdir()
    (root / "other" / "config.yaml").write_text("theme: dark\n")
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    offline = ("--checkpoint", str(run))
    commands |= {
        "unknown key": train(root / "r", "run.sed=1"),
        "tp": train(root / "r", "learner.tp=3"),
        "fp8": train(root / "r", "precision.fp8=delayed"),
        "nccl": train(root / "r", "learner.backend=nccl"),
        "recipe is a folder": Command(("check", str(run))),
        "recipe is no text": Command(("check", str(root / "latin.yaml"))),
        "run.dir is a file": train(root / "file"),
        "run.dir below a file": train(root / "file" / "r"),
        "run.dir of another program": train(root / "other"),
        "world size": train(root / "r", variables={**torchrun, "WORLD_SIZE": "3", "MASTER_PORT": "29500"}),
        "no address": train(root / "r", variables={"RANK": "0", "WORLD_SIZE": "1"}),
        "no run.dir": Command(("train", QUICKSTART, *TINY), variables={**torchrun, "MASTER_PORT": "29500"}),
        "no checkpoint": Command(("eval", QUICKSTART, *TINY, "--checkpoint", str(root))),
        "no episodes": Command(("rollout", QUICKSTART, *TINY, *offline, "--episodes", "0")),
        "no batch": Command(("check", QUICKSTART, *TINY, "--loss", str(run), str(root / "none.npz"))),
        "batch is none": Command(("check", QUICKSTART, *TINY, "--loss", str(run), str(run / "metrics.jsonl"))),
        "loss": Command(("check", QUICKSTART, *TINY, "--loss", str(run), str(run / "batch.npz"))),
        "eval": Command(("eval", str(run / "config.yaml"), *offline)),
        "rollout": Command(("rollout", QUICKSTART, *TINY, *offline, "--episodes", "3")),
    }
    shutil.copytree(run, root / "used")
    commands["used"] = train(root / "used", "run.export=true")
    with socket.socket() as s, locked(root / "used" / ".lock"):
        s.bind(("", 0))
        s.listen()
        commands["port"] = train(root / "r", variables=torchrun | {"MASTER_PORT": str(s.getsockname()[1])})
        found = {name: shell(command) for name, command in commands.items()}
    assert not (root / "r").exists(), "a refused configuration leaves no run folder"
    return found


SAID = {name: said for name, (_, _, said) in DAMAGED.items()} | {
    "unknown key": "run.sed = '1': no such key. Did you mean run.seed?",
    "tp": "learner.tp = 3: tp=3 does not divide the model's num_key_value_heads (2); use one of 1, 2",
    "fp8": "precision.fp8 = 'delayed': FP8 needs a CUDA GPU",
    "nccl": "learner.backend = 'nccl': this machine has no CUDA GPU. Use learner.backend=auto",
    "recipe is a folder": "a folder, not a file. Give ",
    "recipe is no text": "not readable as YAML",
    "run.dir is a file": "cannot be written (File exists). Choose another folder",
    "run.dir below a file": "cannot be written (Not a directory). Choose another folder",
    "run.dir of another program": "its config.yaml is not that of a run (theme = ",
    "world size": "needs 1 ranks, but the launcher started 3. Make both agree",
    "no address": "MASTER_ADDR = None: RANK is set, but this variable is not as torchrun or srun would set it",
    "no run.dir": "ranks that another launcher starts need one common folder. Give run.dir",
    "port": "cannot be used ([Errno 98] Address already in use). Choose a free port or unset it",
    "no checkpoint": "no complete checkpoint is there. Name a run folder or a step-… folder",
    "no episodes": "0 is below 1",
    "no batch": "no such file. A run keeps the batch of its last step in batch.npz",
    "batch is none": "metrics.jsonl is not a saved batch, or was cut off",
    "used": f"is in use by process {os.getpid()} on {socket.gethostname()}. Wait for its end, stop it",
}


@pytest.mark.parametrize("name", SAID)
def test_refused_in_one_line(answers, name):
    code, out = answers[name]
    assert code == 2 and SAID[name] in out, out
    assert "Traceback" not in out
    if name != "no episodes":  # argparse adds the usage
        assert out.startswith("mcore-agent") and out.count("\n") == 1, out


@pytest.mark.parametrize(("name", "said"), [("loss", "loss "), ("eval", "greedy"), ("rollout", "hop_lookup/eval/2")])
def test_commands_on_a_run_folder(answers, name, said):
    code, out = answers[name]
    assert code == 0 and said in out, out


@pytest.mark.parametrize("recipe", ["quickstart", "quickstart_moe"])
def test_plan(shell, recipe):
    """``check`` counts what the recipe's own numbers imply."""
    code, out = shell(Command(("check", f"recipes/{recipe}.yaml")))
    assert code == 0, out
    experts = 4 if recipe == "quickstart_moe" else 0
    mlp = experts * (3 * 64 * 96 + 64) if experts else 3 * 64 * 192  # each expert also has a row of the router
    layer = 64 * 16 * (4 + 2 + 2) + 4 * 16 * 64 + 2 * 16 + 2 * 64 + mlp  # q, k, v; out; norms of q and k, of both halves
    assert f"{384 * 64 + 2 * layer + 64:,}" in out
    assert f"{8 * 16} = 8 tasks x 16" in out and f"learner ranks         {2 if experts else 1} = " in out


# ---------------------------------------------------------------------------------------------- checkpoints and disks


def test_a_damaged_checkpoint_is_passed_over_aloud(shell, run, tmp_path):
    """The run goes on from the newest whole checkpoint; when none is whole it says so and does not start over."""
    spoiled, lost, marks = tmp_path / "spoiled", tmp_path / "lost", tmp_path / "marks"
    for folder in (spoiled, lost, marks):
        shutil.copytree(run, folder)
    (last(spoiled) / SHARD).unlink()
    for checkpoint in (lost / "checkpoints").glob("step-*"):
        shortened(SHARD)(checkpoint)
    for checkpoint in (marks / "checkpoints").glob("step-*"):
        (checkpoint / "COMPLETE").unlink()
    before = (run / "metrics.jsonl").read_text()
    first, second, third = (shell(train(folder, "run.export=true")) for folder in (spoiled, lost, marks))
    assert first[0] == 0 and "resumed after step 18" in first[1], first[1]
    assert f"A newer checkpoint is damaged and passed over: {last(run).name}"[:-11] in first[1] and SHARD in first[1]
    assert [m["step"] for m in metrics(spoiled)] == list(range(1, 21)) and whole(spoiled) == 20
    for (code, out), folder, why in ((second, lost, "meta.json says"), (third, marks, "has no COMPLETE")):
        assert code == 2 and "is whole" in out and why in out and "or delete its checkpoints to start over" in out, out
        assert (folder / "metrics.jsonl").read_text() == before


@pytest.mark.defect("G12")
def test_full_disk(shell, tmp_path):
    """No space for a checkpoint, for the metrics, for the first files: a message each, and the run goes on with space."""
    folder, none = tmp_path / "run", tmp_path / "none"
    start_up = shell(train(none, file_limit=3000))  # the configuration fits, the tokenizer does not
    tensors = shell(train(folder, file_limit=1_000_000))
    numbers = shell(train(folder, "run.save_every=0", file_limit=2500))  # all that is left to write is metrics and episodes
    again = shell(train(folder))
    assert start_up[0] == 2 and "the tokenizer cannot be written" in start_up[1] and "free space" in start_up[1], start_up[1]
    assert sorted(path.name for path in none.iterdir()) == [".lock", "config.yaml"]
    assert tensors[0] == 1 and "the tensors cannot be written" in tensors[1] and "is the disk full? Free space" in tensors[1], tensors[1]
    assert numbers[0] == 1 and "[Errno 27] File too large. Free space and give the same command again" in numbers[1], numbers[1]
    for _, out in (start_up, tensors, numbers):
        assert "Traceback" not in out
    assert again[0] == 0 and whole(folder) == 20, again[1]
    assert [m["step"] for m in metrics(folder)] == list(range(1, 21))


# ------------------------------------------------------------------------------------------------------- environments


@pytest.mark.defect("H4")
def test_an_environment_that_is_down(shell, tmp_path):
    """Failed episodes are counted, not scored; after three steps with nothing else the run ends and says why."""
    variables = {"BREAK": "down", "BREAK_LOG": str(tmp_path / "log")}
    words = (QUICKSTART, *TINY, BREAKABLE)
    trained = shell(train(tmp_path / "run", BREAKABLE, RL, variables=variables))
    evaluated = shell(Command(("eval", *words), variables))
    played = shell(Command(("rollout", *words, "--episodes", "2"), variables))
    said = "no episode could be played to its end; {} of the last {} failed with: env_error: the sandbox is gone. Mend the environment"
    assert trained == (1, trained[1]) and f"in 3 steps {said.format(8, 8)}" in trained[1] and "Traceback" not in trained[1], trained[1]
    assert evaluated[0] == 1 and f"in an evaluation {said.format(6, 6)}" in evaluated[1], evaluated[1]
    assert played[0] == 0 and played[1].count("infra_fail env_error: the sandbox is gone") == 2, played[1]
    steps = metrics(tmp_path / "run")  # the third step's is not written: the run ends in it
    assert [m["rollout/dropped/env_error"] for m in steps] == [8, 8] and [m["rollout/retries/env_error"] for m in steps] == [16, 16]
    assert not any("reward/mean" in m or m["optimizer_steps"] for m in steps)
    calls = Counter((tmp_path / "log").read_text().split())
    assert calls["open"] == calls["close"] == 3 * (3 * 8 + 6 + 2)  # three tries for every episode


def records(path: Path):
    """Records of a wandb file: 7 bytes of header, then blocks of 32 KiB of pieces with checksum, length and kind."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # all of a record, or its last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_a_fault_is_shown_and_tracking_goes_on(shell, tmp_path):
    """A fault of an environment's code is no failed episode: its traceback is shown, environments are closed, and the
    mended run goes on as the same wandb run with rising steps, though a harmless key has changed."""
    folder, log = tmp_path / "run", {"BREAK_LOG": str(tmp_path / "log")}
    broken = shell(train(folder, BREAKABLE, "tracking.wandb=offline", variables=log | {"BREAK": "fault"}))
    mended = shell(train(folder, BREAKABLE, "tracking.wandb=offline", "tracking.name=second", "run.keep=3", variables=log))
    assert broken[0] == 1 and "KeyError: \"a fault of the environment's code\"" in broken[1] and "Traceback" in broken[1], broken[1]
    assert mended[0] == 0 and "resumed after step" in mended[1], mended[1]
    calls = Counter((tmp_path / "log").read_text().split())
    assert calls["open"] == calls["close"] > 0
    parts = [list(records(path)) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]
    runs = [next(r.run for r in part if r.HasField("run")) for part in parts]
    assert [r.display_name for r in runs] == ["run", "second"] and runs[0].run_id == runs[1].run_id
    steps = [r.history.step.num for part in parts for r in part if r.HasField("history")]
    assert steps == list(range(1, 21))
    assert [next(r.exit.exit_code for r in part if r.HasField("exit")) for part in parts] == [1, 0]


# -------------------------------------------------------------------------------------------- processes that are killed


@pytest.fixture
def begin():
    """Starts commands, and ends them with the test."""
    processes = []

    def run(*words: str, **variables: str):
        processes.append(start(*words, **variables))
        return processes[-1]

    yield run
    for process in processes:
        if process.poll() is None:
            end(process)


def ended(process, processes, seconds: float) -> tuple[int, str]:
    """Exit code and errors of a command that ends within ``seconds``, and with it everything that it started."""
    _, err = process.communicate(timeout=SLACK * seconds)
    _, alive = psutil.wait_procs(processes, timeout=SLACK * 3)
    assert not alive, f"{alive} outlived the command"
    return process.returncode, err


def ranks_of(process, folder: Path, step: int) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Everything that a command has started, and the ranks among it in order, once it has logged ``step``."""
    wait_for(lambda: len(metrics(folder)) >= step or process.poll() is not None, 150, f"step {step}")
    processes = tree(process.pid)
    ranks = [p for p in processes if "RANK" in p.environ() and "RANK" not in p.parent().environ()]  # rank 0 has children
    return processes, sorted(ranks, key=lambda p: p.environ()["RANK"])


def test_full_disk_under_two_ranks(begin, tmp_path):
    folder = tmp_path / "run"
    process = begin(*train(folder, "learner.dp=2").words)
    processes, ranks = ranks_of(process, folder, 4)
    for rank in ranks:
        rank.rlimit(psutil.RLIMIT_FSIZE, (200_000, 200_000))
    code, err = ended(process, processes, 60)
    assert code == 1 and "mcore-agent (rank 0): " in err and "is the disk full? Free space" in err and "Traceback" not in err, err
    assert 2 <= whole(folder) < 20


def test_a_rank_that_is_stopped_while_it_fails_says_why_it_failed(monkeypatch, capsys):
    """The rank that has nothing to say may end first, and the launcher then stops the one that closes its engines."""

    async def fails(*_):
        try:
            raise CheckpointError("no space")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(1)

    monkeypatch.setattr(cli, "_command", lambda *_: asyncio.run(fails()))
    monkeypatch.setattr(launch, "join_launcher", lambda: None)
    monkeypatch.setenv(launch.LAUNCHER, "1")
    monkeypatch.setenv("RANK", "1")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert cli.main(["check", "recipe.yaml"]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "mcore-agent (rank 1): no space\n"


def test_an_interrupt_while_forking_is_not_lost():
    """Python drops what a callback of fork raises: the interrupt waits until the process has been started."""
    started = []
    with pytest.raises(KeyboardInterrupt), interrupts_later():
        os.kill(os.getpid(), signal.SIGINT)
        started.append(True)
    assert started


def test_a_rank_that_refuses_decides_the_exit_code(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(2)\ntime.sleep(60)\n")
    with (tmp_path / "log").open("wb") as log:
        assert run_ranks(2, [str(script)], 1, log) == 2
    assert (tmp_path / "log").read_text() == ""  # no report of torchrun's


def test_a_rank_that_dies_in_native_code_shows_where_it_was(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os\nfrom mcore_agent.launch import join_launcher\njoin_launcher()\ndef at_fault():\n    os.abort()\nat_fault()\n"
    )
    with (tmp_path / "log").open("wb") as log:
        assert run_ranks(1, [str(script)], 1, log) == 1
    said = (tmp_path / "log").read_text()
    assert "Fatal Python error: Aborted" in said and "in at_fault" in said and "rank 0 was ended by SIGABRT" in said


@pytest.mark.defect("H2", "H9")
@pytest.mark.parametrize("words", [(), ("run.async_save=true", "run.save_every=1", "stages.1.steps=300")], ids=["", "while saving"])
def test_a_killed_rank_ends_the_run(begin, words, tmp_path):
    folder = tmp_path / "run"
    process = begin(*train(folder, "learner.dp=2", *words).words)
    processes, ranks = ranks_of(process, folder, 14)
    ranks[1].kill()
    code, err = ended(process, processes, 15)
    assert code == 1 and "rank 1 was ended by SIGKILL" in err
    assert whole(folder, killed=True) >= 12


@pytest.mark.defect("H2")
def test_a_killed_launcher_leaves_no_rank_behind(begin, tmp_path):
    """At a moment drawn at random while the ranks start up."""
    process = begin(*train(tmp_path / "run", "learner.dp=2").words)
    wait_for(lambda: len(tree(process.pid)) > 1, 60, "a rank")
    seed = int.from_bytes(os.urandom(2), "little")
    time.sleep(random.Random(seed).uniform(0, 5))
    processes = tree(process.pid)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(processes[1:], timeout=SLACK * 10)
    assert not alive, f"seed {seed}: {alive} outlived the command"


@pytest.mark.defect("H2")
@pytest.mark.parametrize("words", [(), ("learner.dp=2",)], ids=["alone", "two ranks"])
def test_sigterm_while_starting_up(begin, tmp_path, words):
    folder = tmp_path / "run"
    process = begin(*train(folder, *words).words)
    wait_for(lambda: (folder / "config.yaml").exists(), 60, "the run folder")
    processes = tree(process.pid)
    process.terminate()
    code, err = ended(process, processes, 5)
    assert code in (130, -signal.SIGINT) and err.count("\n") == 1 and "mcore-agent: interrupted" in err, (code, err)


@pytest.mark.defect("H2")
def test_interrupt_during_an_evaluation(begin, tmp_path):
    """As a terminal does, while thousands of episodes are being played."""
    folder = tmp_path / "run"
    process = begin(*train(folder, "run.eval_tasks=5000", "run.save_every=1", "rollout.max_batch=8").words)
    wait_for(lambda: (folder / "checkpoints" / "step-000011" / "COMPLETE").exists() or process.poll() is not None, 100, "step 11")
    time.sleep(1.5)  # after step 12 the stage's evaluation goes on for much longer
    processes = tree(process.pid)
    process.send_signal(signal.SIGINT)
    code, err = ended(process, processes, 5)
    assert code == 130 and err == "mcore-agent: interrupted; the last checkpoint stays, the same command resumes\n", err
    assert whole(folder) == 11


def test_prompts_that_leave_no_room(shell, tmp_path):
    """Steps without a single token end the run: they would go on to its end, and teach nothing."""
    code, out = shell(train(tmp_path / "run", RL, "rollout.max_tokens=14", "rollout.max_new=1", "run.eval_tasks=0"))
    assert code == 2 and "rollout.max_tokens = 14: in 3 steps no token was sampled" in out and "Traceback" not in out
