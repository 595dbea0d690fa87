"""The cache moves numbers: what is written is where it should be, and what is not is zero."""

import numpy as np
import torch

from mcore_agent.rollout.kv import KV, common_prefix

LAYERS, HEADS, DIM = 2, 3, 5


def filled(rows: int, columns: int, room: int = 0, seed: int = 0) -> tuple[KV, torch.Tensor]:
    """A cache written layer by layer, and what was written: [layers, rows, heads, columns, dim]."""
    written = torch.randn(LAYERS, rows, HEADS, columns, DIM, generator=torch.Generator().manual_seed(seed))
    kv = KV(LAYERS, rows, columns + room)
    for layer in range(LAYERS):
        keys, values = kv.update(written[layer], -written[layer], layer)
        assert torch.equal(keys, written[layer]) and torch.equal(values, -written[layer])
    kv.advance(columns)
    return kv, written


def test_appending_grows():
    kv, written = filled(2, 4, room=1)
    for step in range(6):
        new = torch.full((2, HEADS, 1, DIM), float(step))
        for layer in range(LAYERS):
            keys, _ = kv.update(new, new, layer)
            assert torch.equal(keys[:, :, :4], written[layer]) and keys.shape[2] == 5 + step
            assert keys[:, :, 4:, :].amax((0, 1, 3)).tolist() == [float(s) for s in range(step + 1)]
        kv.advance(1)
    assert kv.get_seq_length() == 10


def test_removed_rows_are_replaced_by_the_last():
    kv, written = filled(4, 6)
    kv.remove(1)
    kv.remove(2)
    keys, values = kv.buffers()
    assert kv.rows == 2
    assert torch.equal(keys[:, :2, :, :6], written[:, [0, 3]]) and torch.equal(values[:, :2, :, :6], -written[:, [0, 3]])


def test_past_goes_out_and_in():
    kv, written = filled(2, 6)
    past = kv.past(1, np.array([7, 8, 9, 10]))
    kv.buffers()[0].zero_()  # a copy
    assert torch.equal(past.keys, written[:, 1, :, 2:]) and past.nbytes == 2 * 4 * LAYERS * HEADS * 4 * DIM
    other = KV(LAYERS, 3, 9)
    other.put_past(2, past, 3, 5)
    keys, values = other.buffers()
    assert torch.equal(keys[:, 2, :, 2:5], written[:, 1, :, 2:5]) and torch.equal(values[:, 2, :, 2:5], -written[:, 1, :, 2:5])
    assert keys[:, :2].abs().sum() == 0 and keys[:, 2, :, :2].abs().sum() == 0


def test_take_closes_holes_and_repeats_rows():
    """Row 0 lies at columns 1 2 5, row 1 at 3 4 5; row 0 is wanted twice."""
    source, written = filled(2, 6)
    kv = KV(LAYERS, 3, 8, length=4)
    columns = torch.tensor([[1, 2, 5], [3, 4, 5]])
    kv.take(source, torch.tensor([2, 0, 1]), torch.tensor([0, 0, 1]), columns[[0, 0, 1]])
    keys, _ = kv.buffers()
    for row, expected in ((2, written[:, 0][:, :, [1, 2, 5]]), (0, written[:, 0][:, :, [1, 2, 5]]), (1, written[:, 1][:, :, 3:])):
        assert torch.equal(keys[:, row, :, 1:4], expected)
    assert keys[:, :, :, 0].abs().sum() == 0


def test_common_prefix():
    a = np.array([1, 2, 3])
    assert common_prefix(a, np.array([1, 2, 3, 4])) == 3
    assert common_prefix(a, np.array([1, 2, 4, 4])) == 2
    assert common_prefix(a, np.array([9])) == 0
