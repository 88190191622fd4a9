"""The proxies of a run as points, of every loss that has some."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmlkit.manifolds import Lorentz, Poincare, Sphere
from dmlkit.plots.split import class_proxies, embed_split, proxies_of
from dmlkit.run_folder.folder import RunFolder
from tests.conftest import ONE_EPOCH

Trained = Callable[..., Path]


@pytest.mark.parametrize(
    ("loss", "of_a_class"),
    [
        ("{name: proxy_anchor}", 1),
        ("{name: soft_triple, centers_per_class: 3}", 3),
        ("{name: cross_batch_memory, loss: {name: contrastive}, size: 16}", 0),
    ],
)
def test_the_proxies_are_those_that_the_loss_has_learned(
    trained_once: Trained, tmp_path: Path, loss: str, of_a_class: int
):
    run = RunFolder(trained_once(tmp_path, ONE_EPOCH.replace("{name: proxy_anchor}", loss)))
    proxies = proxies_of(run, "last", Sphere(8))
    if not of_a_class:
        assert proxies is None
        return
    assert proxies is not None and proxies.labels.bincount().tolist() == [of_a_class] * 3
    learned = run.load_checkpoint("last")["objective"]["loss.proxies"]
    assert torch.allclose(proxies.points, torch.nn.functional.normalize(learned.reshape(-1, 8)))


@pytest.mark.parametrize("proxies", ["features", "points"])
@pytest.mark.parametrize("kind", [Poincare, Lorentz])
def test_proxies_lie_in_the_space_of_the_embeddings(kind: Any, proxies: Any):
    manifold = kind(4, proxies=proxies)
    held = manifold.new_proxies(5).detach()
    found = class_proxies(held, manifold, 5)
    assert found is not None and found.points.shape == (5, manifold.point_dim)
    expected = held if proxies == "points" else manifold.from_features(held)
    assert torch.equal(found.points, expected)


@pytest.mark.parametrize("shape", [(5, 3), (4, 8), (5,), (5, 2, 2, 8)])
def test_what_is_of_another_space_or_of_other_classes_is_none(shape: tuple[int, ...]):
    assert class_proxies(torch.randn(*shape), Sphere(8), 5) is None


def test_a_run_has_the_proxies_of_its_own_classes(trained_once: Trained, tmp_path: Path):
    """Another seed renders other images of the same classes; classes that come later are in no split of the run."""
    run = trained_once(tmp_path)
    same = embed_split(run, "train", device="cpu", overrides=["dataset.seed=1"])
    other = embed_split(run, "train", device="cpu", overrides=["dataset.classes=14"])
    assert same.proxies() is not None and other.proxies() is not None
    assert embed_split(run, "test", device="cpu").proxies() is None
