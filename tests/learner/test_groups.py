"""Layouts that cannot be are refused by name; groups that are made anew are like the first ones."""

import sys
from datetime import timedelta

import pytest
import torch

from mcore_agent.layout import Layout, LayoutError
from mcore_agent.learner import groups as learner_groups
from mcore_agent.learner.groups import Groups
from mcore_agent.loss.sft_nll import SftNll
from tests.learner.jobs import gloo_threads, learner_of
from tests.learner.models import config_of, micro_of, weights_of
from tests.ranks import ranks  # noqa: F401

REFUSED = {
    (("tp", 0),): "it counts ranks or parts, so it is at least 1",
    (("ep", 2),): "a pipeline stage has 1 ranks .* set learner.ep to 1",
    (("dp", 6), ("ep", 4)): "a pipeline stage has 6 ranks .* 4 \\* 1 must .* set learner.ep to 3",
    (("tp", 2), ("dp", 2), ("sp", True), ("ep", 4)): "a pipeline stage has 4 ranks .* 4 \\* 2 must .* set learner.ep to 2",
    (("dp", 4), ("etp", 3)): "a pipeline stage has 4 ranks .* set learner.etp to 2",
    (("dp", 10**12),): "makes 1000000000000 ranks, .* set learner.dp to at most 1048576",
    (("vpp", 2),): "no stages to interleave; set learner.vpp to 1",
    (("sp", True),): "no ranks to split over; switch learner.sp off",
}


@pytest.mark.parametrize("sizes", REFUSED, ids=str)
def test_illegal_layouts(sizes):
    """The key and its value are said once, so that the reason can follow them in another sentence as well."""
    key, value = sizes[-1]
    with pytest.raises(LayoutError, match=REFUSED[sizes]) as caught:
        Layout(**dict(sizes))
    start = f"learner.{key} is {'on' if value is True else value}: "
    assert caught.value.key == f"learner.{key}" and str(caught.value) == start + caught.value.reason and start not in caught.value.reason


def test_experts_and_the_layout():
    with pytest.raises(LayoutError, match="learner.sp is off: .* parallelism only with sequence parallelism; switch learner.sp on"):
        Layout(tp=2).check_experts(4)
    with pytest.raises(LayoutError, match="learner.ep is 2: the model has no experts to split; set learner.ep to 1"):
        Layout(dp=2, ep=2).check_experts(0)
    with pytest.raises(LayoutError, match="learner.etp is 1: the model has no experts to split"):
        Layout(tp=2, etp=1).check_experts(0)
    Layout(tp=2).check_experts(0)
    Layout(tp=2, sp=True).check_experts(4)


def test_sizes():
    n = Layout(tp=2, pp=2, cp=2, dp=3, ep=4, etp=1, sp=True)
    assert (n.stage_ranks, n.replica, n.expert_dp, n.world) == (12, 8, 3, 24)


def places(groups: Groups) -> tuple[int, int, int]:
    """(this rank by its place as a member of a replica, as a holder of experts, and as it is)"""
    n = groups
    edp = (groups.rank % n.layout.stage_ranks) // (n.layout.ep * n.layout.etp)
    first = n.expert_rank(etp=n.etp_rank, ep=n.ep_rank, pp=n.pp_rank)
    return n.global_rank(n.tp_rank, n.cp_rank, n.dp_rank, n.pp_rank), first + edp * n.layout.ep * n.layout.etp, n.rank


@pytest.mark.parametrize("layout", [
    Layout(tp=2, pp=2, cp=2, sp=True),
    Layout(tp=2, dp=2, ep=2, etp=1, pp=2, sp=True),
    Layout(dp=4, etp=2),
], ids=str)  # fmt: skip
def test_every_rank_knows_its_place(ranks, layout):  # noqa: F811
    for rank, found in enumerate(ranks(places, layout)):
        assert found == (rank, rank, rank)


def timeouts(groups: Groups) -> set[timedelta]:
    made = [groups.tp, groups.pp, groups.cp, groups.dp, groups.ep]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in made}


def rebuilt(groups: Groups) -> list[set[timedelta]]:
    """Timeouts of all groups over three layouts and back."""
    found = []
    for layout in (groups.layout, Layout(dp=4), Layout(tp=2, pp=2), groups.layout):
        found.append(timeouts(learner_groups.initialize(layout, timeout_s=120)))
    return found


@pytest.mark.defect("F8")
def test_rebuilt_groups_keep_their_timeout(ranks):  # noqa: F811
    for found in ranks(rebuilt, Layout(tp=2, cp=2)):
        assert found == [{timedelta(minutes=2)}] * 4


def used_up(groups: Groups) -> int:
    """Threads of process groups at the beginning; then a learner takes a step and is left alone."""
    before = gloo_threads()
    learner = learner_of(groups, config_of("qwen3_moe", True), weights_of("qwen3_moe", True))
    learner.step([micro_of([5, 3], 1)], [SftNll()], 1e-3)
    return before


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_learner_that_is_gone_keeps_no_groups(ranks):  # noqa: F811
    """Each layout joins anew, and must find no more threads than the last time."""
    one, other = Layout(tp=2, sp=True), Layout(dp=2, ep=2)
    ranks(used_up, other)
    assert ranks(used_up, one) == [ranks(used_up, layout) for layout in (other, one)][1]
