"""The section ``teacher``: a teacher that the policy cannot be distilled from, or that nothing would learn from, is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_agent.agent.tokenizer import save_tokenizer, train_tokenizer
from mcore_agent.config import ConfigError, load_config
from mcore_agent.config_rules import check_model
from mcore_agent.teacher import Teacher
from tests.fakes import hop_tokenizer

QUICKSTART = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
CONFIG = {
    "model_type": "llama", "vocab_size": 384, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3,
    "num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
LOSS = "loss=[{name: ppo_clip}, {name: distill}]"


def folder(path: Path, **changes) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return f"teacher.path={path}"


@pytest.mark.parametrize("loss", [LOSS, "loss=[{name: distill_top_k, top_k: 384}]", "loss=[{name: ppo_clip}, {name: distill, coef: 0}]"])
def test_accepted(loss, tmp_path):
    assert load_config(QUICKSTART, [loss, folder(tmp_path)]).teacher.path == str(tmp_path)


@pytest.mark.parametrize(("words", "changes", "said"), [
    ((), {}, r"has no effect: no loss term of an rl stage learns from a teacher"),
    ((LOSS, "stages=[{kind: sft, steps: 3}]"), {}, r"has no effect: no loss term of an rl stage"),
    ((LOSS,), {"vocab_size": 390}, r"its vocabulary has 390 tokens, the policy's 384"),
    ((LOSS,), {"model_type": "bert"}, r"teacher\.path = .*bert"),
    ((LOSS,), {"max_position_embeddings": 250}, r"reads at most 250 of the 260 tokens of rollout\.max_tokens"),
    ((LOSS, "learner.tp=2"), {}, r"tp=2 does not divide the model's num_key_value_heads \(3\).*split as the policy is"),
    ((LOSS,), {"head_dim": 9}, r"head_dim 9 is odd"),
])  # fmt: skip
def test_refused(words, changes, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        load_config(QUICKSTART, [*words, folder(tmp_path, **changes)])


def test_what_is_not_there_is_refused(tmp_path):
    for words, said in (
        ([LOSS], r"loss\[1\] = .*needs a teacher\. Give teacher\.path"),
        (["loss=[{name: distill_top_k, top_k: 3}]"], r"loss\[0\] = .*needs a teacher"),
        ([LOSS, f"teacher.path={tmp_path}"], r"teacher\.path = .*no Hugging Face folder.*run\.export"),
        (["loss=[{name: distill_top_k, top_k: 385}]", folder(tmp_path / "t")], r"loss\[0\] = .*the vocabulary has 384 tokens"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(QUICKSTART, words)


def test_files_are_held_against_the_config(tmp_path):
    with pytest.raises(ConfigError, match=r"teacher\.path = "):
        check_model(load_config(QUICKSTART, [LOSS, folder(tmp_path)]))


def test_another_tokenizer_is_refused(tmp_path):
    """Both are named, with the first token on which they differ."""
    teacher, ours = SimpleNamespace(path=tmp_path), hop_tokenizer()
    with pytest.raises(ConfigError, match=r"teacher\.path = .*holds no tokenizer_config\.json"):
        Teacher.check(teacher, ours)
    save_tokenizer(ours, tmp_path)
    Teacher.check(teacher, ours)
    other = train_tokenizer(["zebra zebra quagga quagga"] * 3, 280)
    with pytest.raises(ConfigError, match=rf"its tokenizer, of {len(ours)} tokens, is not the policy's, of {len(other)}: .* number"):
        Teacher.check(teacher, other)
