"""The formulas of Muon against singular values, and against Megatron's own."""

import pytest
import torch

from mcore_agent.learner.muon import Matrix, Momentum, orthogonal, orthogonal_update, scale_of

COEFFICIENTS = [  # of the quintic iteration, as published
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
SHAPES = [(24, 9), (7, 30), (16, 16)]


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """The iteration acts on each singular value s alone: s <- a s + b s^3 + c s^5, begun with s / Frobenius norm."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / matrix.double().norm()
    for a, b, c in COEFFICIENTS:
        s = a * s + b * s**3 + c * s**5
    return ((u * s) @ v).float()


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz(shape):
    matrix = random(*shape)
    found = orthogonal(matrix, torch.float32)
    torch.testing.assert_close(found, by_singular_values(matrix), rtol=1e-4, atol=1e-5)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.7 and values.max() < 1.2
    half = orthogonal(matrix, torch.bfloat16)
    assert half.dtype == torch.float32 and (half - found).norm() / found.norm() < 0.03
    assert not orthogonal(torch.zeros(shape), torch.float32).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_scales(shape):
    """Of an exactly orthogonal matrix: root mean square 1 / sqrt(fan in), or 0.2."""
    rows, columns = shape
    u, _, v = torch.linalg.svd(random(*shape), full_matrices=False)
    size = (u @ v).square().mean().sqrt()
    assert float(size * scale_of(rows, columns, "fan_in") * columns**0.5) == pytest.approx(1, rel=1e-5)
    assert float(size * scale_of(rows, columns, "rms_match")) == pytest.approx(0.2, rel=1e-5)


def test_fused_matrices_are_orthogonalized_one_by_one():
    """Two query groups of 6 rows of q, 3 of k, 3 of v: all q together, all k together, all v together."""
    momentum = random(24, 10)
    found = orthogonal_update(momentum.flatten(), Matrix((24, 10), (6, 3, 3)), "fan_in", torch.float32)
    for rows in ([*range(6), *range(12, 18)], [6, 7, 8, 18, 19, 20], [9, 10, 11, 21, 22, 23]):
        want = by_singular_values(momentum[rows]) * max(1.0, len(rows) / 10) ** 0.5
        torch.testing.assert_close(found[rows], want, rtol=1e-4, atol=1e-5)


def test_equals_megatrons_muon():
    """On one process, where Megatron's own can be driven directly; its package is not required for ours."""
    pytest.importorskip("emerging_optimizers")
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    weight = torch.nn.Parameter(random(24, 10))
    flat = torch.nn.Parameter(weight.detach().flatten().clone())
    theirs = TensorParallelMuon(
        [weight],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        weight_decay=0.3,
        split_qkv=True,
        is_qkv_fn=lambda p: True,
        qkv_split_shapes=[6, 3, 3],
        fp32_matmul_prec="highest",
        scale_mode="spectral",
        extra_scale_factor=0.2,
    )
    ours = Momentum([{"params": [flat], "lr": 0.1, "weight_decay": 0.3}], 0.9, True, "rms_match", torch.float32)
    ours.matrices[flat] = Matrix((24, 10), (6, 3, 3))
    ours.begin()
    for seed in range(3):
        weight.grad = random(24, 10, seed=seed)
        flat.grad = weight.grad.flatten().clone()
        theirs.step()
        ours.step()
    torch.testing.assert_close(flat.view(24, 10), weight, rtol=1e-5, atol=1e-6)
