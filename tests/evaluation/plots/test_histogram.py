"""Histograms of pairs before and after training, against the counts of all pairs."""

from pathlib import Path

import pytest
import torch

from dmlkit.errors import UserError
from dmlkit.evaluation.mistakes import score_histograms
from dmlkit.manifolds import Sphere
from dmlkit.metrics.base import Points
from dmlkit.plots.similarities import counted, plot_histogram, pretrained_points
from dmlkit.plots.split import EmbeddedSplit
from dmlkit.training.experiment import assemble


def test_histograms_are_those_of_the_backbone_and_of_the_model(tested: EmbeddedSplit, tmp_path: Path):
    before, after = plot_histogram(tested, tmp_path / "pairs.pdf")
    assert (tmp_path / "pairs.pdf").stat().st_size > 2000
    trained = Points(tested.points, tested.labels, tested.trained.model.manifold)
    for found, points in ((before, pretrained_points(tested)), (after, trained)):
        assert all(map(torch.equal, found[:3], score_histograms(points)[:3]))  # which a loop checks elsewhere


def test_before_is_the_backbone_that_training_began_with(tested: EmbeddedSplit):
    """An experiment assembled anew has the weights of before the first step."""
    model = assemble(tested.trained.recipe).model.eval()
    pixels = torch.stack([tested.dataset.sample(index) for index in range(4)])
    with torch.no_grad():
        features = torch.nn.functional.normalize(model.backbone(model.normalization(pixels)))
    assert torch.allclose(torch.as_tensor(pretrained_points(tested).embeddings)[:4], features, atol=1e-5)


def test_a_single_class_is_one_line():
    with pytest.raises(UserError, match="the test split has 3 pairs of one class and 0 of different classes"):
        counted(Points(torch.eye(3), torch.zeros(3, dtype=torch.int64), Sphere(3)), "test")
