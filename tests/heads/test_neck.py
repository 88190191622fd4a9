"""The neck against NumPy, the points that losses take before and after it, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from dmlkit.distributed.stopping import TrainingStoppedError
from dmlkit.errors import UserError
from dmlkit.heads import Neck
from dmlkit.losses import ArcFace, Triplet
from dmlkit.manifolds import Euclidean, Poincare, Sphere
from dmlkit.recipe.file import parse_recipe
from dmlkit.training.experiment import assemble
from dmlkit.training.train import train
from tests.training.test_train import assert_equal_weights, weights
from tests.training.test_tuning import Stopper

RECIPE = """\
dataset: {name: glyphs, classes: 24, images_per_class: 10, size: 16}
transform: {name: plain, size: 16}
backbone: {name: small_cnn, width: 4}
embedding_dim: 16
head: {name: neck}
loss:
  name: sum
  losses: [{name: arcface, scale: 8}, {name: triplet, squared: false}]
  on: [after, before]
sampler: {name: class_balanced, classes_per_batch: 4, images_per_class: 4}
training: {epochs: 2}
metrics: [map@r]
"""


def test_it_is_batch_norm_without_shift():
    features = torch.randn(7, 3, dtype=torch.float64) * 4 + 2
    neck = Neck(3, Euclidean(3)).double()
    neck.norm.weight.data.copy_(torch.tensor([1.0, 2.0, 0.5]))
    x = features.numpy()
    mean, variance = x.mean(0), x.var(0)
    expected = (x - mean) / np.sqrt(variance + 1e-5) * [1.0, 2.0, 0.5]
    np.testing.assert_allclose(neck(features).detach().numpy(), expected, rtol=1e-9, atol=1e-12)
    # retrieval takes running statistics, of which one batch is a tenth
    expected = (x - 0.1 * mean) / np.sqrt(0.9 + 0.1 * x.var(0, ddof=1) + 1e-5) * [1.0, 2.0, 0.5]
    np.testing.assert_allclose(neck.eval()(features).detach().numpy(), expected, rtol=1e-9, atol=1e-12)


def test_in_training_the_points_before_it_follow_those_after_it_where_a_loss_takes_them():
    features, neck = torch.randn(6, 4), Neck(4, Sphere(4))
    assert neck(features).shape == (6, 4)
    neck.gives_before = True
    after, before = neck(features).split(4, 1)
    torch.testing.assert_close(before, normalize(features))
    standard = (features - features.mean(0)) / features.std(0, correction=0)
    torch.testing.assert_close(after, normalize(standard), atol=1e-4, rtol=1e-4)
    assert neck.eval()(features).shape == (6, 4)


def test_each_loss_takes_the_points_that_the_recipe_says():
    experiment = assemble(parse_recipe(RECIPE, "r.yaml"))
    images = torch.stack([torch.as_tensor(experiment.train.sample(index)) for index in range(0, 60, 4)])
    labels = experiment.train.labels[:60:4]
    model = experiment.model.train()
    outputs = model(images)
    value = experiment.objective(outputs, labels)
    features = model.backbone(model.normalization(images))
    standard = (features - features.mean(0)) / (features.var(0, correction=0) + 1e-5).sqrt()
    arcface = ArcFace(Sphere(16), experiment.objective.loss.num_classes, scale=8.0)
    arcface.load_state_dict({"proxies": experiment.objective.state_dict()["loss.each.0.proxies"]})
    triplet = Triplet(Sphere(16), squared=False)
    expected = arcface(normalize(standard), labels) + triplet(normalize(features), labels)
    torch.testing.assert_close(value, expected)


def test_a_run_learns_the_scale_keeps_the_shift_at_0_and_resumes_to_the_same_bits(tmp_path: Path):
    recipe = parse_recipe(RECIPE, "r.yaml", ["training.gradient_cache=8", "regularizers=[{name: hierarchy}]"])
    with pytest.warns(UserWarning, match="removes this difference, but not that of the neck"):
        train(recipe, tmp_path / "whole", device="cpu")
        with pytest.raises(TrainingStoppedError):
            train(recipe, tmp_path / "cut", device="cpu", progress=Stopper(0, last=False))
        train(recipe, tmp_path / "cut", device="cpu", resume=True)
    whole = weights(tmp_path / "whole")
    assert_equal_weights(weights(tmp_path / "cut"), whole)
    assert not whole["head.norm.bias"].any()
    assert (whole["head.norm.weight"] - 1).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "metrics",
            "manifold: {name: poincare}\nmetrics",
            "r.yaml:5: head: neck needs manifold.name euclidean or sphere",
        ),
        ("{name: neck}", "{name: linear}", "r.yaml:6: loss: sum needs head.name neck, got linear, because loss.on has"),
        ("[after, before]", "[before]", "r.yaml:6: loss: sum needs loss.on null"),
        ("[after, before]", "[after, between]", "r.yaml:9: loss.on.1: "),
    ],
)
def test_what_does_not_fit_is_refused_when_the_recipe_is_read(old: str, new: str, message: str):
    with pytest.raises(UserError) as error:
        parse_recipe(RECIPE.replace(old, new), "r.yaml")
    assert message in str(error.value)


def test_without_a_layer_the_embedding_is_as_wide_as_the_features():
    recipe = parse_recipe(RECIPE, "r.yaml", ["embedding_dim=8"])
    with pytest.raises(UserError, match="embedding_dim: got 8, but the head none keeps the 16 features"):
        assemble(recipe)
    narrow = parse_recipe(RECIPE, "r.yaml", ["embedding_dim=8", "head={name: neck, head: {name: linear}}"])
    assert assemble(narrow).model.head.get_parameter("head.linear.weight").shape == (8, 16)
    with pytest.raises(ValueError, match="Neck: expected Euclidean space or the sphere, got Poincare"):
        Neck(4, Poincare(4))
