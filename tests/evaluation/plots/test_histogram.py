"""Histograms of pairs before and after training, against a loop over all pairs."""

from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.evaluation.mistakes import ScoreHistograms
from dmlkit.manifolds import Sphere
from dmlkit.metrics.base import Points
from dmlkit.plots.similarities import counted, plot_histogram, pretrained_points
from dmlkit.plots.split import EmbeddedSplit
from dmlkit.training.experiment import assemble

ROUNDING = 3e-7  # of a cosine in float32: a pair so near to an edge may be counted on either side


def check_counts(points: Tensor, labels: Tensor, found: ScoreHistograms) -> None:
    """Count the pairs below every edge in a loop."""
    cosines: dict[bool, list[float]] = {True: [], False: []}
    for one, other in combinations(range(len(points)), 2):
        is_same = bool(labels[one] == labels[other])
        cosines[is_same].append(float(points[one].double() @ points[other].double()))
    for counts, values in ((found.same, cosines[True]), (found.different, cosines[False])):
        assert int(counts.sum()) == len(values)
        for edge, below in zip(found.edges[1:-1].tolist(), counts.cumsum(0).tolist(), strict=False):
            least, most = (sum(value < edge + shift for value in values) for shift in (-ROUNDING, ROUNDING))
            assert least <= below <= most


def test_both_histograms_are_those_of_a_loop(tested: EmbeddedSplit, tmp_path: Path):
    output, before, after = plot_histogram(tested, tmp_path / "pairs.pdf")
    assert output.stat().st_size > 2000
    check_counts(tested.points, tested.labels, after)
    pretrained = pretrained_points(tested)
    check_counts(torch.as_tensor(pretrained.embeddings), torch.as_tensor(pretrained.labels), before)


def test_before_is_the_backbone_that_training_began_with(tested: EmbeddedSplit):
    """An experiment assembled anew has the weights of before the first step."""
    model = assemble(tested.trained.recipe).model.eval()
    pixels = torch.stack([tested.dataset.sample(index) for index in range(4)])
    with torch.no_grad():
        features = torch.nn.functional.normalize(model.backbone(model.normalization(pixels)))
    assert torch.allclose(torch.as_tensor(pretrained_points(tested).embeddings)[:4], features, atol=1e-5)


def test_random_numbers_go_on_as_before(tested: EmbeddedSplit):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with torch.random.fork_rng(devices=[]):
        pretrained_points(tested)
    assert torch.rand(1) == expected


def test_a_single_class_is_one_line():
    with pytest.raises(UserError, match="the test split has 3 pairs of one class and 0 of different classes"):
        counted(Points(torch.eye(3), torch.zeros(3, dtype=torch.int64), Sphere(3)), "test")
