"""The contract of miners."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dmlkit.manifolds import Sphere
from dmlkit.miners.base import Miner, MinerConfig, Triplets
from dmlkit.testing.promise import Promise, expect, fitting_manifolds, hold

DIM = 6


def check_miner(config: MinerConfig) -> None:
    """Hold a miner to its contract: positives and negatives are what it says, without gradient, for any batch.

    Raises:
        AssertionError: names what is broken.

    Example:
        >>> from dmlkit.miners import HardConfig
        >>> check_miner(HardConfig())
    """
    hold(MINER, config.name, config)


def build(config: MinerConfig) -> Miner:
    """The miner, on the first manifold that it takes."""
    return config.build(fitting_manifolds(config)[0].build(DIM))


def candidates(rows: int = 7, columns: int = 11, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Distances and labels of rows against more columns, the first of which are the rows."""
    generator = torch.Generator().manual_seed(seed)
    points = normalize(torch.randn(columns, DIM, dtype=torch.float64, generator=generator), dim=1)
    labels = torch.randint(3, (columns,), generator=generator)
    alike = labels[:rows, None] == labels
    return Sphere(DIM).distance(points[:rows], points), alike.clone().fill_diagonal_(False), ~alike


def choices(triplets: Triplets, negative: Tensor) -> dict[tuple[int, int], set[int]]:
    """{(anchor, positive): set of its negatives}."""
    chosen: dict[tuple[int, int], set[int]] = {}
    for a, p in triplets.keep.nonzero().tolist():
        everything = negative[a].nonzero().flatten().tolist()
        chosen[a, p] = set(everything) if triplets.negative is None else {int(triplets.negative[a, p])}
    return chosen


def _expect_negatives(triplets: Triplets, negative: Tensor) -> None:
    for (anchor, _), chosen in choices(triplets, negative).items():
        wrong = [column for column in chosen if not negative[anchor, column]]
        expect(not wrong, f"columns {wrong} are no negatives of anchor {anchor}")


def it_keeps_positives_and_chooses_negatives(config: MinerConfig) -> None:
    """It keeps positives alone, and chooses negatives of the anchor."""
    distance, positive, negative = candidates()
    triplets = build(config)(distance, positive, negative)
    expect(triplets.keep.any(), "it keeps nothing")
    expect(not (triplets.keep & ~positive).any(), "it keeps what is no positive")
    _expect_negatives(triplets, negative)


def it_has_no_gradient(config: MinerConfig) -> None:
    """What it chooses is bool and int64, without a gradient."""
    distance, positive, negative = candidates()
    triplets = build(config)(distance.requires_grad_(), positive, negative)
    expect(triplets.keep.dtype == torch.bool, f"keep is {triplets.keep.dtype}")
    chosen = triplets.negative
    expect(chosen is None or chosen.dtype == torch.int64, "negative is not int64")
    expect(chosen is None or not chosen.requires_grad, "negative has a gradient")


def rows_without_positives_or_negatives_are_no_error(config: MinerConfig) -> None:
    """In a batch of one class, or without positives, no triplet is chosen, and columns stay in range."""
    for alike in (True, False):
        mask = torch.full((4, 4), alike).fill_diagonal_(True)
        triplets = build(config)(torch.rand(4, 4), mask.clone().fill_diagonal_(False), ~mask)
        what = "one class" if alike else "no positives"
        expect(not any(choices(triplets, ~mask).values()), f"{what}: it chooses something")
        chosen = triplets.negative
        expect(chosen is None or ((chosen >= 0) & (chosen < 4)).all(), f"{what}: a column is out of range")


def equal_distances_are_no_error(config: MinerConfig) -> None:
    """Where all distances are 0 it still chooses negatives."""
    _, positive, negative = candidates()
    _expect_negatives(build(config)(torch.zeros(positive.shape), positive, negative), negative)


MINER: tuple[Promise, ...] = (
    it_keeps_positives_and_chooses_negatives,
    it_has_no_gradient,
    rows_without_positives_or_negatives_are_no_error,
    equal_distances_are_no_error,
)
