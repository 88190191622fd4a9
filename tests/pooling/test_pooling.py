"""Pooling against loops over the places of a map."""

import pytest
import torch

from dmlkit.pooling import AvgMax, Cls, GeM, PoolingConfig

MAPS = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_values_equal_loops():
    flat = MAPS.flatten(2).tolist()
    expected = {
        "avg": lambda places: sum(places) / 20,
        "max": max,
        "avg_max": lambda places: sum(places) / 20 + max(places),
        "gem": lambda places: (sum(place**3 for place in places) / 20) ** (1 / 3),
    }
    for name, function in expected.items():
        pooled = PoolingConfig.variants[name]().build()(MAPS)
        loops = torch.tensor([[function(places) for places in image] for image in flat])
        torch.testing.assert_close(pooled.float(), loops.float())
    assert set(expected) | {"cls"} == set(PoolingConfig.variants)


def test_gem_runs_from_average_to_maximum_and_learns():
    torch.testing.assert_close(GeM(p=1.0)(MAPS), MAPS.float().mean((2, 3)))
    torch.testing.assert_close(GeM(p=200.0)(MAPS), MAPS.float().amax((2, 3)), rtol=0.02, atol=0)
    assert list(GeM().parameters()) == [] and not GeM().state_dict()
    learned = GeM.Config(learn=True, p=3.0).build()
    learned(MAPS).sum().backward()
    assert learned.p.grad is not None and learned.p.grad > 0 and list(learned.state_dict()) == ["p"]
    zeros = torch.zeros(1, 2, 3, 3, requires_grad=True)
    GeM()(zeros).sum().backward()
    assert zeros.grad is not None and zeros.grad.isfinite().all()


@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e4])
def test_gem_neither_overflows_nor_underflows(scale: float):
    """Against float64, which holds these powers: values, and the gradients of the maps and of p."""
    maps = (scale * torch.tensor([[[[3.0, 5.0, 7.0]]]])).requires_grad_()
    pool = GeM(p=30.0, learn=True)
    pool(maps).sum().backward()
    exact, p = maps.detach().double().requires_grad_(), torch.tensor(30.0, dtype=torch.float64, requires_grad=True)
    (pooled := exact.pow(p).mean().pow(1 / p)).backward()
    torch.testing.assert_close(pool(maps).item(), pooled.item(), rtol=1e-6, atol=0)
    torch.testing.assert_close(maps.grad, exact.grad.float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(pool.p.grad, p.grad.float(), rtol=1e-4, atol=0)


def test_gem_survives_half_precision():
    large = torch.full((1, 1, 2, 2), 1000.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(GeM()(large.half()), torch.tensor([[1000.0]]))


def test_the_class_token_needs_a_transformer():
    with pytest.raises(ValueError, match="needs a backbone with a class token"):
        Cls()(MAPS)
    torch.testing.assert_close(AvgMax()(MAPS, torch.zeros(2, 3)), MAPS.mean((2, 3)) + MAPS.amax((2, 3)))
