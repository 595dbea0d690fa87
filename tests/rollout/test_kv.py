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


def test_rows_that_keep_fewer_columns_end_together():
    """Of 3 new columns the rows keep 3, 1 and 2; the tokens before column ``first`` are nobody's and stay where they are."""
    kv, written = filled(3, 7)
    kv.first = 2
    kv.settle(3, [3, 1, 2])
    keys, values = kv.buffers()
    assert kv.length == 7
    for row, shift in enumerate((0, 2, 1)):
        assert torch.equal(keys[:, row, :, 2 + shift : 7], written[:, row, :, 2 : 7 - shift])
        assert torch.equal(values[:, row, :, 2 + shift : 7], -written[:, row, :, 2 : 7 - shift])
        assert torch.equal(keys[:, row, :, :2], written[:, row, :, :2])
    kv.settle(3, [1, 1, 1])
    assert kv.length == 5 and torch.equal(kv.buffers()[0][:, 0, :, 2:5], written[:, 0, :, 2:5])


def test_experts_move_with_keys_and_values():
    """[layers, rows, columns, k] as written, through growth, settling, removal and a past."""
    mixtures, k = 2, 4
    kv = KV(LAYERS, 3, 4)
    chosen = torch.arange(mixtures * 3 * 6 * k, dtype=torch.int64).reshape(mixtures, 3, 6, k)

    def write(begin: int, end: int) -> None:
        for layer in range(LAYERS):
            some = torch.ones(3, HEADS, end - begin, DIM)
            kv.update(some, some, layer)
            if layer < mixtures:
                kv.put_experts(layer, mixtures, chosen[layer, :, begin:end].reshape(-1, k))
        kv.advance(end - begin)

    write(0, 3)
    write(3, 6)  # grows
    kv.settle(3, [3, 1, 3])
    kv.remove(0)  # row 2 takes its place
    for row, expected in ((0, chosen[:, 2]), (1, chosen[:, 1, :4])):
        found = kv.experts(row, 4)
        assert found is not None and found.dtype == np.int32
        assert np.array_equal(found, expected[:, -4:].transpose(0, 1).numpy())
    past = kv.past(0, np.arange(6))
    other = KV(LAYERS, 2, 8, length=7)
    other.put_past(1, past, 5, 7)
    assert np.array_equal(other.experts(1, 5), chosen[:, 2, :5].transpose(0, 1).numpy())
    assert past.nbytes == 6 * (2 * LAYERS * HEADS * DIM * 4 + mixtures * k * 4)
    assert filled(1, 2)[0].experts(0, 2) is None
