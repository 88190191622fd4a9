"""What heat maps show, against a loop over all pairs."""

import pytest
import torch

from dmlkit.manifolds import Lorentz, Sphere
from dmlkit.manifolds.base import Manifold
from dmlkit.plots.similarities import class_similarities, heat_maps
from dmlkit.plots.split import EmbeddedSplit
from dmlkit.run_folder.checkpoint_file import WEIGHTS, read_checkpoint


@pytest.mark.parametrize("manifold", [Sphere(3), Lorentz(3)], ids=["sphere", "lorentz"])
def test_class_similarities_are_those_of_a_loop(manifold: Manifold):
    points, labels = manifold.from_features(torch.randn(12, 3)), torch.tensor([4, 1, 1, 4, 2, 1, 4, 4, 2, 1, 7, 2])
    found, classes = class_similarities(manifold, points, labels), [1, 2, 4, 7]
    for one, row in zip(classes, found, strict=True):
        for other, mean in zip(classes, row.tolist(), strict=True):
            pairs = [
                float(manifold.paired_similarity(points[i].double(), points[j].double()))
                for i in range(12)
                for j in range(12)
                if i != j and labels[i] == one and labels[j] == other
            ]
            assert (mean != mean) if not pairs else mean == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)


def test_samples_and_proxies_are_ordered_by_class(trained_on: EmbeddedSplit):
    maps = heat_maps(trained_on)
    assert maps.to_proxies is not None and maps.proxy_labels is not None
    assert maps.proxy_labels.tolist() == [0, 1, 2] and maps.sample_labels.tolist() == sorted(trained_on.labels.tolist())
    checkpoint = read_checkpoint(trained_on.run.checkpoint_path(trained_on.trained.checkpoint), WEIGHTS)
    proxies = checkpoint["objective"]["loss.proxies"]
    order = trained_on.labels.argsort(stable=True).tolist()
    for row, index in enumerate(order):
        for label in range(3):
            cosine = torch.nn.functional.cosine_similarity(trained_on.points[index], proxies[label], dim=0)
            assert float(maps.to_proxies[row, label]) == pytest.approx(float(cosine), abs=1e-5)


def test_some_classes_bring_their_own_proxies_alone(trained_on: EmbeddedSplit):
    maps = heat_maps(trained_on.of_classes(2))
    assert maps.proxy_labels is not None and maps.to_proxies is not None
    assert maps.classes.tolist() == maps.proxy_labels.tolist() == [0, 2]
    assert maps.to_proxies.shape == (12, 2) and maps.between.shape == (2, 2)


def test_unseen_classes_have_no_proxies(tested: EmbeddedSplit):
    maps = heat_maps(tested)
    assert maps.to_proxies is None and maps.between.shape == (6, 6)
