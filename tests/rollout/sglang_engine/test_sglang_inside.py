"""What the plugin in the server does with tensors, without a server."""

import pytest
import torch

from mcore_agent.rollout.sglang.inside import cropped


def test_zeros_that_a_kernel_wanted_are_taken_off():
    whole = torch.randn(5, 7)
    padded = torch.nn.functional.pad(whole, (0, 1, 0, 3))
    assert torch.equal(cropped(padded, [5, 7]), whole)
    assert torch.equal(cropped(whole, [5, 7]), whole)


@pytest.mark.parametrize("shape", [[4, 7], [5, 8], [5], None])
def test_anything_else_is_left_as_it_is(shape: list[int] | None):
    """Also rows that hold numbers: then the shape differs from the checkpoint's, and so does the checksum."""
    whole = torch.randn(5, 7)
    assert cropped(whole, shape) is whole
