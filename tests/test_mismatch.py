"""How far engine and learner disagree: measured by hand-made numbers, watched, and judged by plain transformers."""

import asyncio
import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mcore_agent.config import Config, RolloutConfig, save_config
from mcore_agent.mismatch import (
    Drift,
    DriftAlarm,
    MismatchError,
    arbitrate,
    drift,
    drift_by_age,
    dump,
    forward_logp,
    numbers_of,
    outliers,
    read_dump,
)
from mcore_agent.rollout.local import LocalEngine
from mcore_agent.types import Batch
from tests.rollout.tiny import CONFIGS, answer, checkpoint, publish, reference, requests
from tests.strategies import SEEDS, episode_of, random_batch, row_of, with_columns

TOOL = Path(__file__).parent.parent / "tools" / "mismatch.py"
spec = importlib.util.spec_from_file_location("mismatch_tool", TOOL)
assert spec and spec.loader
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def test_drift_by_hand():
    """Differences ln 2, -ln 2, 0: mean 2 ln 2 / 3, max ln 2, k3 = (2 - ln 2 - 1 + .5 + ln 2 - 1 + 0) / 3 = .5 / 3."""
    found = drift(np.array([-1 + math.log(2), -1 - math.log(2), -3]), np.array([-1, -1, -3]))
    assert found.tokens == 3 and found.abs_max == pytest.approx(math.log(2))
    assert found.abs_mean == pytest.approx(2 * math.log(2) / 3) and found.k3 == pytest.approx(0.5 / 3)
    assert found.numbers().keys() == {"mismatch/logp_abs_mean", "mismatch/logp_abs_max", "mismatch/k3"}
    assert drift(np.zeros(0), np.zeros(0)) == Drift() and Drift().numbers() == {} and Drift().abs_mean == 0


def test_drifts_of_ranks_add_up():
    rng = np.random.default_rng(0)
    one, other = -rng.exponential(size=50), -rng.exponential(size=50)
    whole, parts = drift(one, other), drift(one[:13], other[:13]) + Drift() + drift(one[13:], other[13:])
    assert (parts.tokens, parts.abs_max) == (whole.tokens, whole.abs_max)
    assert parts.abs_mean == pytest.approx(whole.abs_mean) and parts.k3 == pytest.approx(whole.k3)


def test_k3_is_exact_where_both_sides_nearly_agree():
    """d = 1e-8: exp(d) - d - 1 is d^2 / 2 = 5e-17, which is lost when 1 is added first."""
    assert drift(np.array([1e-8]), np.zeros(1)).k3 == pytest.approx(5e-17, rel=1e-3, abs=0)


def test_a_number_that_is_not_finite_is_not_hidden():
    assert math.isnan(drift(np.array([np.nan, -1]), np.array([-1, -1])).abs_mean)
    assert math.isinf(drift(np.array([-np.inf, -1]), np.array([-1, -1])).abs_max)


def two_versions() -> Batch:
    """Tokens of versions 4 and 6 with |differences| .5 and .1, .3; an observation between, whose numbers are junk."""
    row = replace(row_of([0, 1, 0, 1, 1]), version=np.array([-1, 4, -1, 6, 6]))
    batch = Batch((replace(episode_of("a", "g", 0.0), rows=(row,)),))
    return batch.with_columns(logp_old=np.array([9, -1, 7, -1, -1.0]), logp_prox=np.array([-9, -1.5, np.nan, -1.1, -0.7]))


def test_ages_are_told_apart():
    ages = drift_by_age(two_versions(), version=6)
    assert list(ages) == [0, 2] and (ages[0].tokens, ages[2].tokens) == (2, 1)
    numbers = numbers_of(ages)
    assert numbers["mismatch/age_0/logp_abs_mean"] == pytest.approx(0.2) and numbers["mismatch/age_2/logp_abs_mean"] == pytest.approx(0.5)
    assert numbers["mismatch/logp_abs_mean"] == pytest.approx(0.3) and numbers["mismatch/logp_abs_max"] == pytest.approx(0.5)
    assert not any("age" in name for name in numbers_of({0: ages[0]}))


@pytest.mark.defect("C19")
@pytest.mark.parametrize("look", [lambda b: drift_by_age(b, 6), lambda b: outliers(b, 3)])
def test_a_missing_column_is_an_error(look):
    batch = two_versions()
    with pytest.raises(MismatchError, match="no column 'logp_prox' to compare; it has: logp_old"):
        look(Batch(batch.episodes, {"logp_old": batch.columns["logp_old"]}))


# ------------------------------------------------------------------------------------------------------- alarm


@pytest.mark.defect("I1")
def test_the_alarm_is_raised_by_a_slow_rise_and_not_by_noise():
    """From .011 to .036 within 30 steps, which tripled unnoticed in public; and 300 steps around .011."""
    rising, noisy = DriftAlarm(), DriftAlarm()
    said = {step: text for step in range(31) if (text := rising.observe(0.011 + 0.025 * step / 30))}
    ((step, text),) = said.items()
    # the first five steps have mean .0127; the mean of the last five is the value two steps ago: .011 + (s - 2) / 1200 > .0253
    assert step == 20 and rising.active
    assert "mean |log-probability difference| of 5 steps is 2.60e-02, above 2.53e-02; it began at 1.27e-02" in text
    rng = np.random.default_rng(1)
    assert not any(noisy.observe(v) for v in 0.011 * rng.uniform(0.7, 1.3, 300)) and not noisy.active


def test_the_alarm_has_hysteresis():
    """Window 1, start .01, so that the limit is .02 and its end .016: values between the two change nothing."""
    alarm = DriftAlarm(window=1)
    said = [alarm.observe(v) for v in (0.01, 0.019, 0.021, 0.019, 0.021, 0.017, 0.015, 0.019, 0.021)]
    assert [i for i, text in enumerate(said) if text] == [2, 6, 8]
    assert "drift apart" in said[2] and "agree again" in said[6] and "drift apart" in said[8]


def test_bound_and_floor():
    """A run that begins badly is told by the bound; one that is exact to rounding may double without a word."""
    bad, exact = DriftAlarm(bound=0.1), DriftAlarm()
    assert [bool(bad.observe(0.2)) for _ in range(6)] == [False] * 4 + [True, False]
    assert not any(exact.observe(v) for v in [1e-7] * 5 + [9e-4] * 20) and exact.threshold == 1e-3
    assert any(exact.observe(v) for v in [2e-3] * 5)


def test_stop_raises_and_so_does_a_value_that_is_no_number():
    alarm = DriftAlarm(window=1, stop=True)
    alarm.observe(0.01)
    with pytest.raises(MismatchError, match="drift apart"):
        alarm.observe(0.03)
    with pytest.raises(MismatchError, match="is nan"):
        DriftAlarm().observe(math.nan)
    with pytest.raises(MismatchError, match="factor 1 must be above 1"):
        DriftAlarm(factor=1)


def test_an_alarm_goes_on_after_a_resume():
    """I10: cut at any step, the rest says the same."""
    values = [0.011 + 0.025 * step / 30 for step in range(31)]
    for cut in (0, 3, 12, 25):
        first = DriftAlarm()
        said = [first.observe(v) for v in values[:cut]]
        second = DriftAlarm()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        said += [second.observe(v) for v in values[cut:]]
        whole = DriftAlarm()
        assert said == [whole.observe(v) for v in values] and second.active == whole.active


# ---------------------------------------------------------------------------------------------------- outliers


def test_the_worst_rows_by_hand(tmp_path):
    """Largest differences per row: .2 (a/0), .9 (a/1), none (b/0, nothing sampled), .5 (c/0)."""
    batch = Batch((episode_of("a", "g", 0.0, [0, 1], [0, 1, 0, 1]), episode_of("b", "g", 0.0, [0]), episode_of("c", "g", 0.0, [1, 1])))
    old = np.full(9, -1.0)
    prox = old + np.array([5, 0.2, 5, 0.1, 5, -0.9, 5, 0, 0.5])
    found = outliers(batch.with_columns(logp_old=old, logp_prox=prox), 5)
    assert [(r["episode"], r["row"], r["at"]) for r in found] == [("a", 1, 3), ("c", 0, 1), ("a", 0, 1)]
    assert [r["gap"] for r in found] == pytest.approx([0.9, 0.5, 0.2])
    assert found[0]["tokens"] == [1, 2, 3, 4] and found[0]["places"] == [1, 3] and found[0]["version"] == [0, 0]
    assert found[0]["engine"] == [-1, -1] and found[0]["learner"] == pytest.approx([-0.9, -1.9])
    assert outliers(batch.with_columns(logp_old=old, logp_prox=prox), 1) == found[:1]
    dump(tmp_path / "mismatch" / "step-000003.jsonl", found)
    assert read_dump(tmp_path / "mismatch" / "step-000003.jsonl") == found
    (tmp_path / "x.jsonl").write_text('{"episode": "a"')
    with pytest.raises(MismatchError, match=r"x.jsonl is no dump of outliers"):
        read_dump(tmp_path / "x.jsonl")


def test_outliers_of_random_batches_hold_what_the_columns_say():
    for seed in SEEDS[:30]:
        batch = with_columns(random_batch(seed), seed)
        found = outliers(batch, 10**6)
        assert len(found) == len({r for r, row in zip(batch.token_row, batch.channel("pg"), strict=True) if row})
        assert [r["gap"] for r in found] == sorted((r["gap"] for r in found), reverse=True)
        by_id = {e.id: e for e in batch.episodes}
        for r in found:
            row = by_id[r["episode"]].rows[r["row"]]
            assert row.tokens.tolist() == r["tokens"] and np.flatnonzero(row.channel("pg")).tolist() == r["places"]
            assert max(np.abs(np.array(r["engine"]) - r["learner"])) == pytest.approx(r["gap"])


def test_a_row_that_is_no_number_comes_first():
    batch = Batch((episode_of("a", "g", 0.0, [0, 1]), episode_of("b", "g", 0.0, [0, 1])))
    batch = batch.with_columns(logp_old=np.full(4, -1.0), logp_prox=np.array([0, -3, 0, np.nan]))
    assert [r["episode"] for r in outliers(batch, 2)] == ["b", "a"]


# ----------------------------------------------------------------------------------------------------- arbiter


def played(temperature: float, versions=(3,)) -> Batch:
    """What the local engine samples from a tiny model, as rows; with the true log-probabilities as the learner's."""
    async def body():
        engine = LocalEngine(CONFIGS["qwen3"])
        await engine.wake()
        await publish(engine, checkpoint("qwen3"), versions[0])
        asked = requests([5, 9, 3], temperature=temperature)
        done = await answer(engine, asked)
        await engine.close()
        return list(zip(asked, done, strict=True))

    episodes = []
    for i, (r, c) in enumerate(asyncio.run(body())):
        sampled = np.arange(len(r.tokens) + len(c.tokens)) >= len(r.tokens)
        blank = np.zeros(len(r.tokens))
        row = replace(row_of(sampled, np.concatenate([r.tokens, c.tokens]), np.concatenate([blank, c.logp])),
                      version=np.concatenate([blank - 1, c.version]))  # fmt: skip
        episodes.append(replace(episode_of(f"e{i}", "g", 0.0), rows=(row,)))
    batch = Batch(tuple(episodes))
    truth = np.concatenate([forward_logp(reference("qwen3"), row.tokens, temperature) for row in batch.rows])
    return batch.with_columns(logp_old=batch.tokens("logp"), logp_prox=truth)


@pytest.mark.defect("C16")
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_engine_and_arbiter_agree_at_the_temperature_of_sampling_and_at_no_other(temperature):
    batch = played(temperature)
    assert drift_by_age(batch, 3)[0].abs_max < 1e-4
    records = outliers(batch, 3)
    assert [v.side for v in arbitrate(reference("qwen3"), records, temperature)] == ["neither"] * 3
    assert [v.side for v in arbitrate(reference("qwen3"), records, 1.0)] == ["both"] * 3


def test_the_arbiter_says_which_side_is_off():
    batch = played(1.0)
    mask = batch.channel("pg")
    wrong = np.where(mask, 0.05, 0.0)
    truth, engine = batch.columns["logp_prox"], batch.columns["logp_old"]
    model = reference("qwen3")

    def sides(**columns):
        return {v.side for v in arbitrate(model, outliers(batch.with_columns(**columns), 3), 1.0)}

    assert sides(logp_prox=truth + wrong) == {"learner"}
    assert sides(logp_old=engine + wrong) == {"engine"}
    assert sides(logp_old=engine + wrong, logp_prox=truth - wrong) == {"both"}
    assert sides(logp_old=engine + 10 * wrong, logp_prox=truth + wrong) == {"engine"}  # the other is far better
    (one, *_) = arbitrate(model, outliers(batch.with_columns(logp_prox=truth + wrong), 1), 1.0)
    assert one.learner == pytest.approx(0.05, abs=1e-4) and one.engine < 1e-4
    assert one.tokens == 11  # ``max_new`` of every request


def test_the_arbiter_compares_only_tokens_of_the_weights_it_has():
    """A row whose first half was sampled by older weights: with ``version`` its gap is nobody's fault."""
    batch = played(1.0)
    row = batch.rows[0]
    own = np.flatnonzero(row.sampled)
    row = replace(row, version=np.where(np.arange(len(row)) == own[0], 2, row.version))
    batch = Batch((replace(batch.episodes[0], rows=(row,)),)).with_columns(
        logp_old=np.where(np.arange(len(row)) == own[0], -9.0, batch.columns["logp_old"][: len(row)]),
        logp_prox=batch.columns["logp_prox"][: len(row)],
    )
    records = outliers(batch, 1)
    assert [v.side for v in arbitrate(reference("qwen3"), records, 1.0)] == ["engine"]
    (verdict,) = arbitrate(reference("qwen3"), records, 1.0, version=3)
    assert verdict.side == "neither" and verdict.tokens == len(own) - 1
    assert arbitrate(reference("qwen3"), records, 1.0, version=7) == []


# ------------------------------------------------------------------------------------------------ command line


def a_run(folder: Path, temperature: float = 1.0) -> Path:
    lines = [{"step": 1, "stage": "sft", "loss": 2.0}]
    for step in range(2, 40):
        lines.append({"step": step, "mismatch/logp_abs_mean": step / 1000, "mismatch/logp_abs_max": 0.5, "correction/ess": 0.875})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_config(replace(Config(), rollout=RolloutConfig(temperature=temperature)), folder / "config.yaml")
    return folder


def test_the_tool_prints_steps_and_verdicts(tmp_path, capsys):
    batch = played(0.6)
    run = a_run(tmp_path, 0.6)
    assert tool.main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert "0.002" in shown and "0.039" in shown and "0.875" in shown and "kept no outliers" in shown and "k3" not in shown
    gap = np.where(batch.channel("pg"), 0.25, 0)
    dump(run / "mismatch" / "step-000002.jsonl", outliers(batch.with_columns(logp_prox=batch.columns["logp_prox"] + gap), 2))
    assert tool.main([str(run)]) == 0
    assert "Worst rows" in capsys.readouterr().out
    reference("qwen3").save_pretrained(tmp_path / "hf")
    assert tool.main([str(run), "--model", str(tmp_path / "hf"), "--version", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("│ learner │") == 2 and "0.25" in shown


@pytest.mark.parametrize(("words", "says"), [
    (["nowhere"], "No such file"), (["{run}", "--model", "nowhere"], "nowhere is no Hugging Face folder"),
    (["{run}", "--model", "{hf}", "--version", "8"], "no kept row has a token of weight version 8"),
])  # fmt: skip
def test_the_tool_says_what_is_missing(words, says, tmp_path, capsys):
    run = a_run(tmp_path)
    dump(run / "mismatch" / "a.jsonl", outliers(played(1.0), 1))
    reference("qwen3").save_pretrained(tmp_path / "hf")
    assert tool.main([w.format(run=run, hf=tmp_path / "hf") for w in words]) == 2
    assert says in capsys.readouterr().err


def test_a_run_without_measurements(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert tool.main([str(tmp_path)]) == 0 and "no step that compares" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    assert tool.main([str(tmp_path)]) == 2 and "metrics.jsonl is damaged" in capsys.readouterr().err
