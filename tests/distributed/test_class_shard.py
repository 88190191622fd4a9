"""Proxies shared out over ranks: value and gradient of one rank that holds them all."""

import json

import pytest

from dmlkit.losses.base import LossConfig
from tests.distributed.class_shards import print_distances
from tests.processes import start_ranks

SHARDED = sorted(name for name, variant in LossConfig.variants.items() if variant.shares_classes is True)


@pytest.fixture(scope="module")
def distances() -> dict[int, dict[str, float]]:
    return {ranks: json.loads(start_ranks(ranks, print_distances)[0].splitlines()[-1]) for ranks in (2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("fraction", ["1", "0.6"])
@pytest.mark.parametrize("loss", [*SHARDED, "weighted proxy_nca"])
def test_sharded_equals_whole_in_value_and_gradient(distances: dict[int, dict[str, float]], loss: str, fraction: str):
    for ranks in (2, 3):
        assert distances[ranks][f"{loss} {fraction}"] < 1e-10


def test_the_losses_that_share_their_proxies_out():
    assert [
        *("arcface", "cosface", "mpa", "norm_softmax"),
        *("proxy_anchor", "proxy_isa", "proxy_nca", "soft_triple"),
    ] == SHARDED
