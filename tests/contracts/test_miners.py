"""The contract of every registered miner, and its choice against an enumeration straight from its paper."""

import pytest
import torch

from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.miners import DistanceWeighted, MinerConfig
from dmlkit.testing import check_miner
from dmlkit.testing.steps import candidates, choices

SPHERE = Sphere(6)


def of_all(distance, positives, negatives):
    return {p: set(negatives) for p in positives}


def of_semi_hard(distance, positives, negatives):
    beyond = {p: [n for n in negatives if distance[n] > distance[p]] for p in positives}
    return {p: {min(farther, key=lambda n: distance[n])} for p, farther in beyond.items() if farther}


def of_hard(distance, positives, negatives):
    if not positives or not negatives:
        return {}
    return {max(positives, key=lambda p: distance[p]): {min(negatives, key=lambda n: distance[n])}}


ENUMERATIONS = {"all": of_all, "semi_hard": of_semi_hard, "hard": of_hard}
RANDOM = {"distance_weighted"}


def test_every_miner_is_enumerated_here():
    assert set(MinerConfig.variants) == set(ENUMERATIONS) | RANDOM


@pytest.mark.parametrize("name", ENUMERATIONS)
@pytest.mark.parametrize("seed", range(5))
def test_equals_the_enumeration(name, seed):
    distance, positive, negative = candidates(seed=seed)
    found = choices(MinerConfig.variants[name]().build(SPHERE)(distance, positive, negative), negative)
    expected = {}
    for a in range(len(distance)):
        positives, negatives = positive[a].nonzero().flatten().tolist(), negative[a].nonzero().flatten().tolist()
        for p, chosen in ENUMERATIONS[name](distance[a].tolist(), positives, negatives).items():
            expected[a, p] = chosen
    assert {key: value for key, value in found.items() if value} == {k: v for k, v in expected.items() if v}


def test_a_negative_as_far_as_the_positive_is_not_semi_hard():
    labels = torch.tensor([0, 0, 1, 1])
    alike = labels[:, None] == labels
    distance = torch.tensor([[0.0, 0.5, 0.5, 0.7]]).repeat(4, 1)
    chosen = MinerConfig.variants["semi_hard"]().build(SPHERE)(distance, alike & ~torch.eye(4).bool(), ~alike)
    assert chosen.keep[0, 1] and chosen.negative is not None and chosen.negative[0, 1] == 3


@pytest.mark.parametrize("name", MinerConfig.variants)
def test_contract(name):
    check_miner(MinerConfig.variants[name]())


class TestDistanceWeighted:
    def draw(self, miner, distances, positives=20_000, **kwargs):
        """How often each of the distances is drawn."""
        torch.manual_seed(0)
        count = len(distances)
        distance = torch.cat([torch.tensor(distances), torch.zeros(positives)])[None].double()
        negative = (torch.arange(count + positives) < count)[None]
        chosen = miner(distance, ~negative, negative).negative[0, count:]
        return torch.bincount(chosen, minlength=count)[:count] / positives

    @pytest.mark.parametrize("dim", [3, 8, 64])
    def test_frequencies_follow_the_inverse_density_of_the_paper(self, dim):
        distances = [0.3, 0.6, 0.62, 0.65, 1.0, 1.39, 1.5]
        weights = []
        for d in distances:
            clipped = max(d, 0.5)
            density = clipped ** (dim - 2) * (1 - clipped**2 / 4) ** ((dim - 3) / 2)
            weights.append(0.0 if d > 1.4 else 1 / density)
        expected = torch.tensor(weights) / sum(weights)
        torch.testing.assert_close(self.draw(DistanceWeighted(Sphere(dim)), distances), expected, rtol=0, atol=0.012)

    def test_far_negatives_are_drawn_evenly_where_there_are_no_others(self):
        frequencies = self.draw(DistanceWeighted(Sphere(128)), [1.5, 1.7, 1.9])
        torch.testing.assert_close(frequencies, torch.full((3,), 1 / 3), rtol=0, atol=0.012)

    def test_each_positive_draws_for_itself(self):
        torch.manual_seed(0)
        distance, positive, negative = candidates(40, 60)
        drawn = DistanceWeighted(SPHERE)(distance, positive, negative).negative
        assert any(len(set(row.tolist())) > 1 for row in drawn)

    def test_an_arc_is_turned_into_its_chord(self):
        chords = [0.6, 1.0, 1.39]
        arcs = (2 * torch.tensor(chords, dtype=torch.float64).div(2).asin()).tolist()
        expected = self.draw(DistanceWeighted(Sphere(8)), chords)
        torch.testing.assert_close(self.draw(DistanceWeighted(Sphere(8, metric="arc")), arcs), expected)

    def test_refuses_other_manifolds_and_ranges(self):
        with pytest.raises(ValueError, match=r"expected Sphere, because .* got Euclidean"):
            DistanceWeighted(Euclidean(3))
        with pytest.raises(ValueError, match=r"max_distance: got 2, expected less than 2"):
            DistanceWeighted(SPHERE, max_distance=2)

    def test_a_cutoff_beyond_the_farthest_drawn_is_refused(self):
        with pytest.raises(ValueError, match=r"cutoff: got 1.5, expected at most max_distance, 1.4"):
            DistanceWeighted(SPHERE, cutoff=1.5)
        assert DistanceWeighted(SPHERE, cutoff=1.5, max_distance=1.5).cutoff == 1.5
