"""Proxies shared out over ranks: value and gradient of one rank that holds them all."""

import json
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, distributed, nn

from dmlkit.losses.base import LossConfig
from dmlkit.losses.proxies import proxy_loss
from dmlkit.losses.proxies.informative import InformativeOptions
from dmlkit.losses.proxies.proxy_loss import ProxyLoss
from dmlkit.manifolds import Sphere
from tests.processes import run_on_ranks

WEIGHTED = "weighted proxy_nca"
SHARDED = sorted(name for name, variant in LossConfig.variants.items() if variant.shares_classes is True)
CLASSES, DIM, BATCH = 47, 8, 12  # no number of ranks divides 47, and a rank's part of them is more than a batch


class WarmSphere(Sphere):
    """A sphere with a learnable temperature, which gets a gradient from the classes of every rank."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def similarity(self, x: Tensor, y: Tensor) -> Tensor:
        return super().similarity(x, y) / self.temperature


def gradients(
    loss: Any, points: Tensor, labels: Tensor, chosen: Tensor | None, total: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Value, and the gradients of points, proxies and temperature; ``chosen`` is what a step samples."""
    select = proxy_loss.select
    if chosen is not None:
        select = lambda *_: (chosen, total)  # noqa: E731
    leaf = points.clone().requires_grad_()
    with patch.object(proxy_loss, "select", select):
        value = loss(leaf, labels)
    return value.detach(), list(torch.autograd.grad(value * 3, (leaf, loss.proxies, loss.manifold.temperature)))


def build(name: str, fraction: float) -> ProxyLoss:
    torch.manual_seed(0)
    # with these every weight of Proxy-ISA takes several values in the batch
    weights = {"hardness": 1.2, "search_margin": 0.0}
    options = {"proxy_isa": weights, WEIGHTED: {"informative": InformativeOptions.Config(**weights)}}.get(name, {})
    config = LossConfig.variants[name.split()[-1]](negative_fraction=fraction, chunk_size=3, **options)
    loss = config.build(WarmSphere(), CLASSES).double()
    if name in ("proxy_isa", WEIGHTED):  # weights differ from 1 only with something in memory
        labels = torch.arange(80) % CLASSES
        around = loss.manifold.proxy_points(loss.proxies.detach())[labels]
        points = nn.functional.normalize(around + 0.4 * torch.randn(around.shape, dtype=around.dtype), dim=1)
        loss.set_epoch(2)
        clean = torch.rand(80) < 0.8
        loss.informative.remember(points, labels, clean, loss.manifold, loss.proxies, loss.shard)
    return loss


def distance(name: str, fraction: float, rank: int, ranks: int) -> float:
    """The largest difference of this rank's value and gradients from those of all classes on one rank."""
    points = nn.functional.normalize(torch.randn(BATCH, DIM, dtype=torch.float64), dim=1)
    labels = torch.arange(BATCH) // 3 * 13 % CLASSES
    whole, part = build(name, fraction), build(name, fraction)
    part.keep_shard(rank, ranks)
    mine = part.shard.classes
    chosen, own, total = None, None, CLASSES
    if fraction < 1:
        torch.manual_seed(7)
        drawn = [build(name, fraction) for _ in range(ranks)]
        samples = []
        for other, loss in enumerate(drawn):
            loss.keep_shard(other, ranks)
            start = loss.shard.classes.start
            torch.manual_seed(7 + other)
            samples.append(loss.classes(points, labels).chosen + start)
        chosen, own = torch.cat(samples), samples[rank] - mine.start
        total = len(chosen)
    expected, (to_points, to_proxies, to_temperature) = gradients(whole, points, labels, chosen, total)
    value, found = gradients(part, points, labels, own, total)
    wanted = [expected, to_points, to_proxies[mine.start : mine.stop], to_temperature]
    # what a loss remembers of the batch is the same on all ranks
    pairs = zip([value, *found, *part.buffers()], [*wanted, *whole.buffers()], strict=True)
    return max(float((x - y).nan_to_num(0).abs().max()) + (x.isnan() != y.isnan()).sum() for x, y in pairs)


def print_distances() -> None:
    """Of each loss, with all classes and with sampled ones."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    result: dict[str, float] = {}
    for name in [*SHARDED, WEIGHTED]:
        for fraction in (1.0, 0.6):
            torch.manual_seed(1)
            far = torch.tensor(distance(name, fraction, rank, ranks))
            distributed.all_reduce(far, distributed.ReduceOp.MAX)
            result[f"{name} {fraction:g}"] = float(far)
    if rank == 0:
        print(json.dumps(result))  # noqa: T201
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def distances() -> dict[int, dict[str, float]]:
    return {ranks: json.loads(run_on_ranks(ranks, print_distances)[0].splitlines()[-1]) for ranks in (2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("fraction", ["1", "0.6"])
@pytest.mark.parametrize("loss", [*SHARDED, WEIGHTED])
def test_sharded_equals_whole_in_value_and_gradient(distances: dict[int, dict[str, float]], loss: str, fraction: str):
    for ranks in (2, 3):
        assert distances[ranks][f"{loss} {fraction}"] < 1e-10


def test_the_losses_that_share_their_proxies_out():
    assert [
        *("arcface", "cosface", "mpa", "norm_softmax"),
        *("proxy_anchor", "proxy_isa", "proxy_nca", "soft_triple"),
    ] == SHARDED
