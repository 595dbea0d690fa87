"""A saved batch is the same batch, under any layout; a damaged file is refused."""

import numpy as np
import pytest

from mcore_agent.batch.microbatch import PlanError
from mcore_agent.batch.plan import split
from mcore_agent.batch.rowset import RowSet, rowset
from mcore_agent.loss.k3_kl import K3Kl
from mcore_agent.loss.ppo_clip import PpoClip
from tests.strategies import batch_of, random_batch, with_columns


def test_saved_and_loaded_rows_are_equal_to_the_bit(tmp_path):
    rows = rowset(with_columns(random_batch(4), 4), [PpoClip(), K3Kl()])
    rows.save(tmp_path / "batch.npz")
    loaded = RowSet.load(tmp_path / "batch.npz")
    assert loaded.count == rows.count and loaded.columns.keys() == rows.columns.keys()
    assert "w:1" in loaded.columns
    for name in ("tokens", "lengths", "rows"):
        assert np.array_equal(getattr(loaded, name), getattr(rows, name))
    for name, values in rows.columns.items():
        assert loaded.columns[name].dtype == np.float32 and np.array_equal(loaded.columns[name], values)
    for budget, dp in ((10**6, 1), (20, 2), (9, 3)):
        assert np.array_equal(split(loaded, budget, dp).rows, rows.rows)


def test_the_file_is_the_one_named(tmp_path):
    rowset(batch_of([1, 0])).save(tmp_path / "batch")
    assert [p.name for p in tmp_path.iterdir()] == ["batch"]


def test_a_set_without_rows_can_be_saved(tmp_path):
    rows = rowset(with_columns(batch_of([1, 1]), 0).with_columns(advantage=np.zeros(6)), [PpoClip()])
    rows.save(tmp_path / "none.npz")
    loaded = RowSet.load(tmp_path / "none.npz")
    assert loaded.count == 2 and len(loaded.rows) == 0 and split(loaded, 5, 2).empty


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "batch.npz"
    rowset(batch_of([1, 0])).save(path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"not a batch"):
        path.write_bytes(content)
        with pytest.raises(PlanError, match=r"batch.npz is not a saved batch"):
            RowSet.load(path)
    np.savez(path, tokens=np.arange(3))
    with pytest.raises(PlanError, match=r"is not a saved batch.*lengths"):
        RowSet.load(path)
    with pytest.raises(FileNotFoundError):
        RowSet.load(tmp_path / "absent.npz")


def test_rows_must_ascend():
    with pytest.raises(PlanError, match=r"rows \[1, 0\] are not ascending indices below 2"):
        RowSet(np.arange(4), np.array([2, 2]), np.array([1, 0]), 2)
    with pytest.raises(PlanError, match=r"rows \[0, 2\] are not ascending"):
        RowSet(np.arange(4), np.array([2, 2]), np.array([0, 2]), 2)
