"""Requests and answers as JSON, without a server."""

import base64
import json
import time

import numpy as np
import pytest
from transformers import AutoConfig

from mcore_agent.protocols import EngineDown, Request
from mcore_agent.rollout.sglang.wire import Experts, Served, Work, body_of, completion_of
from tests.rollout.tiny import CONFIGS

ASKED = Request("r", np.array([5, 6, 7]), 4, stop=(9,), temperature=0.7, top_p=0.9, top_k=0, seed=-3)
SPANS = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]


def answer(**changes):
    meta = {
        "finish_reason": {"type": "stop", "matched": 9},
        "output_token_logprobs": [[-0.5, 8, None], [-1.5, 2, None], [-0.25, 9, None]],
        "weight_versions": SPANS,
        "cached_tokens": 2,
        "output_top_logprobs": [[[-0.1, 1, None], [-0.5, 8, None]]] * 3,
    }
    return {"output_ids": changes.pop("ids", [8, 2, 9]), "meta_info": {k: v for k, v in {**meta, **changes}.items() if v != "gone"}}


def test_a_request():
    body = body_of(ASKED, "abc", seeded=True)
    assert json.loads(json.dumps(body)) == {
        "rid": "abc",
        "input_ids": [5, 6, 7],
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
        "sampling_params": {
            "max_new_tokens": 4,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": -1,
            "stop_token_ids": [9],
            "sampling_seed": (1 << 63) - 3,
        },
    }
    assert "sampling_seed" not in body_of(ASKED, "abc", seeded=False)["sampling_params"]
    assert body_of(Request("r", np.array([1]), 1, top_k=5, routing=True), "x", False).items() >= {"return_routed_experts": True}.items()


@pytest.mark.defect("C15")
def test_an_answer():
    """Log-probabilities are those of the tokens that were sampled, not of the likeliest."""
    c = completion_of(ASKED, answer(), None)
    assert (c.finish, c.cached, c.error) == ("stop", 2, "")
    assert c.tokens.tolist() == [8, 2, 9] and c.tokens.dtype == np.int64
    assert c.logp.tolist() == [-0.5, -1.5, -0.25] and c.logp.dtype == np.float32
    assert c.version.tolist() == [3, 3, 4] and c.version.dtype == np.int32


def test_an_abort_without_tokens():
    none = {"output_token_logprobs": [], "weight_versions": []}
    c = completion_of(ASKED, answer(ids=[], finish_reason={"type": "abort", "message": "x"}, **none), None)
    assert (c.finish, len(c.tokens), len(c.logp), len(c.version)) == ("abort", 0, 0, 0)


def test_an_abort_by_the_server_is_an_error():
    c = completion_of(ASKED, answer(finish_reason={"type": "abort", "message": "too long", "status_code": 400}), None)
    assert (c.finish, c.error, len(c.tokens)) == ("error", "too long", 0)


@pytest.mark.defect("C19")
@pytest.mark.parametrize(
    "changes",
    [
        {"output_token_logprobs": "gone"},
        {"output_token_logprobs": [[-0.5, 8, None], [-1.5, 2, None]]},
        {"output_token_logprobs": [[-0.5, 8, None], [-1.5, 3, None], [-0.25, 9, None]]},
        {"weight_versions": "gone"},
        {"weight_versions": SPANS[:1]},
        {"weight_versions": [{"version": "default", "start": 0, "end": 3}]},
        {"weight_versions": [{"version": "3;updating", "start": 0, "end": 3}]},
        {"finish_reason": "gone"},
        {"finish_reason": None},
        {"finish_reason": {"type": "stop", "matched": 2}, "ids": [8, 2], "output_token_logprobs": [[-0.5, 8, None], [-1.5, 2, None]]},
        {"finish_reason": {"type": "tired"}},
    ],
    ids=str,
)
def test_an_answer_that_lacks_something_is_no_answer(changes):
    with pytest.raises(EngineDown, match="'r'|weight version"):
        completion_of(ASKED, answer(**changes), None)


@pytest.mark.parametrize("body", [None, [], "text", {"output_ids": [1]}])
def test_garbage(body):
    with pytest.raises(EngineDown, match="'r'"):
        completion_of(ASKED, body, None)


def test_logits_that_are_not_finite():
    """JSON has no NaN: SGLang writes null."""
    c = completion_of(ASKED, answer(output_token_logprobs=[[-0.5, 8, None], [None, 2, None], [-0.25, 9, None]]), None)
    assert c.finish == "error" and "not finite" in c.error and len(c.tokens) == 0


@pytest.mark.parametrize(
    "served",
    [Served(), Served(7), Served(-1, ready=False, asleep=frozenset({"weights", "kv_cache"})), Served(3, updating=True)],
    ids=Served.text,
)
def test_states_survive_the_wire(served):
    assert Served.parse(served.text()) == served
    assert served.serves == (served.text() == str(served.version))


# ---------------------------------------------------------------------------------------------- routed experts


def routed(rows: int, layers: int = 3, top_k: int = 2) -> tuple[np.ndarray, str]:
    values = np.arange(rows * layers * top_k, dtype=np.int32).reshape(rows, layers, top_k)
    return values, base64.b64encode(values.tobytes()).decode()


@pytest.mark.defect("D2")
def test_routed_experts_have_a_row_for_every_token_that_was_read():
    experts = Experts.of(AutoConfig.for_model(**{**CONFIGS["qwen3_moe"], "mlp_only_layers": [1]}))
    assert experts == Experts(3, (0, 2), 2)
    asked = Request("r", np.array([5, 6, 7]), 4, stop=(9,), routing=True)
    values, text = routed(3 + 3 - 1)
    c = completion_of(asked, answer(routed_experts=text), experts)
    np.testing.assert_array_equal(c.routing, values[:, [0, 2]])
    assert c.routing.dtype == np.int32
    for wrong in (routed(6)[1], routed(4)[1], text[:-4], "!", None, 3):
        with pytest.raises(EngineDown, match="expert"):
            completion_of(asked, answer(routed_experts=wrong), experts)
    with pytest.raises(EngineDown, match="expert"):
        completion_of(asked, answer(), experts)
    aborted = answer(ids=[], finish_reason={"type": "abort"}, output_token_logprobs=[], weight_versions=[])
    assert completion_of(asked, aborted, experts).routing is None


@pytest.mark.defect("D6")
def test_routed_experts_travel_as_bytes():
    """4000 tokens of 48 layers and 8 experts are read in the time of a copy, and take 4/3 of their bytes on the way."""
    values, text = routed(4000, 48, 8)
    assert len(text) < 1.34 * values.nbytes
    begun = time.process_time()
    got = Experts(48, tuple(range(48)), 8).read(text, 4000)
    assert time.process_time() - begun < 1.0  # as JSON numbers: several seconds
    np.testing.assert_array_equal(got, values)


def test_dense_models_have_no_experts():
    assert Experts.of(AutoConfig.for_model(**CONFIGS["qwen3"])) is None


# ---------------------------------------------------------------------------------------------------- progress


def test_work_grows_with_tokens_and_with_slow_steps():
    load = {"total_prefill_uncached_tokens": 5, "num_total_tokens": 5, "decode_moments": None}
    work = Work()
    first = work.seen([load])
    assert work.seen([load]) == first
    slow = work.seen([{**load, "num_total_tokens": 6}])
    assert slow > first
    assert work.seen([{**load, "num_total_tokens": 6, "decode_moments": [1, 1, 1, 1, 1, 4.0]}]) >= slow + 4
