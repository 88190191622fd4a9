"""What every loss promises, over every loss that there is and every manifold that it takes."""

import pickle
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from dmlkit.losses.base import Loss, LossConfig
from dmlkit.manifolds import Lorentz, Poincare, Sphere
from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.testing.losses import (
    TRAINING,
    VALUES,
    a_step_never_waits_for_the_device,
    build,
    chunks_of_classes_change_nothing,
    degenerate_batches_stay_finite,
    draw,
    evaluate,
    numbering_of_the_classes_does_not_matter,
    order_of_the_batch_does_not_matter,
    other_manifolds_are_refused,
)
from dmlkit.testing.promise import Promise, all_manifolds, fits, fitting_manifolds, hold, title

pytestmark = pytest.mark.filterwarnings("ignore:ProxyGML")  # k < N at a few classes
CONFIGS = [LossConfig.variants[name]() for name in sorted(LossConfig.variants)]
REFUSED = [(config, [space for space in all_manifolds() if not fits(config, space)]) for config in CONFIGS]

# One of each kind of geometry, bounded or without a least value.
FORMS = ("sphere-cosine", "euclidean-negative_distance", "lorentz-negative_squared_distance", "poincare-origin_cosine")
# What a loss does with similarities depends on their range alone: bounded, without a least value, without a largest
# one, and the steepest.
RANGES = (*FORMS[:2], "euclidean-dot", "euclidean-negative_squared_distance")
# What a geometry gives to the losses is tested by one loss of pairs, proxies, classes and ranks on each of all 13, or
# on the four forms where values do not matter. There the others need the cosine, which has its own products with
# proxies in `losses/proxies/similarity.py`, and one other.
OF_EACH_KIND = ("contrastive", "norm_softmax", "proxy_anchor", "recall_surrogate")
ON_FORMS = (
    order_of_the_batch_does_not_matter,
    numbering_of_the_classes_does_not_matter,
    chunks_of_classes_change_nothing,
)


def is_needed(promise: Promise, name: str, manifold: str) -> bool:
    if name == "per_factor":  # which takes products alone
        return manifold == "product-negative_chordal_distance"
    if promise is a_step_never_waits_for_the_device:
        return manifold in (FORMS if name in OF_EACH_KIND else FORMS[:1])
    if promise is chunks_of_classes_change_nothing and "chunk_size" not in LossConfig.variants[name].model_fields:
        return False
    if promise in ON_FORMS:
        return manifold in (FORMS if name in OF_EACH_KIND else FORMS[:2])
    if name in OF_EACH_KIND:
        return promise is degenerate_batches_stay_finite or manifold in {*FORMS, *RANGES}
    return manifold in RANGES


def values() -> Iterator[Any]:
    for config in CONFIGS:
        for space in fitting_manifolds(config):
            promises = [promise for promise in VALUES if is_needed(promise, config.name, title(space))]
            if promises:
                yield pytest.param(promises, config, space, id=f"{config.name}-{title(space)}")


@pytest.mark.parametrize(("promises", "config", "manifold"), list(values()))
def test_values(promises: list[Promise], config: LossConfig, manifold: ManifoldConfig):
    hold(promises, f"{config.name} on {title(manifold)}", config, manifold)


@pytest.mark.parametrize("config", CONFIGS, ids=title)
def test_training(config: LossConfig):
    hold(TRAINING, config.name, config, fitting_manifolds(config)[0])


@pytest.mark.parametrize(("config", "spaces"), [pytest.param(*case, id=case[0].name) for case in REFUSED if case[1]])
def test_manifolds_that_make_no_sense_are_refused(config: LossConfig, spaces: list[ManifoldConfig]):
    for space in spaces:
        hold([other_manifolds_are_refused], f"{config.name} on {title(space)}", config, space)


def value_and_gradient(loss: Loss, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Value, and gradient of the features."""
    torch.manual_seed(2)
    value = loss(loss.manifold.from_features(features), labels)
    return value.detach(), torch.autograd.grad(value, features)[0]


def twins(first: ManifoldConfig, second: ManifoldConfig) -> list[Any]:
    """Every loss that takes both of two manifolds."""
    both = [config for config in CONFIGS if fits(config, first) and fits(config, second)]
    return [pytest.param(config, first, second, id=f"{config.name}-{title(first)}") for config in both]


ISOMETRIC = [
    (Poincare.Config(clip_distance=None, **options), Lorentz.Config(clip_distance=None, **options))
    for options in (
        {"curvature": -1.0},
        {"curvature": -0.125},  # a power of 2, whose inverse float32 has too
        {"curvature": -4.0, "similarity": "negative_squared_distance"},
        {"curvature": -1.0, "learnable_curvature": True},
    )
]


TWINS = [
    case
    for pair in ISOMETRIC
    for case in twins(*pair)
    if pair is ISOMETRIC[0] or case.values[0].name in OF_EACH_KIND  # what curvature changes is the geometry's
]


@pytest.mark.parametrize(("config", "ball", "sheet"), TWINS)
def test_the_same_points_have_the_same_loss_on_the_ball_and_the_hyperboloid(config, ball, sheet):
    features, labels = draw(dtype=torch.float64)
    on_ball = value_and_gradient(build(config, ball).double(), 0.4 * features, labels)
    on_sheet = value_and_gradient(build(config, sheet).double(), 0.4 * features, labels)
    torch.testing.assert_close(on_ball, on_sheet, rtol=1e-9, atol=1e-9)


# pairwise_cross_entropy takes the similarity as it is, so that its temperature is the paper's
SQUARED = Sphere.Config(similarity="negative_squared_distance")
CHORDS = [case for case in twins(SQUARED, Sphere.Config()) if not case.id.startswith("pairwise_cross_entropy")]


@pytest.mark.parametrize(("config", "squared", "cosine"), CHORDS)
def test_half_the_squared_chord_below_1_is_the_cosine(config, squared, cosine):
    features, labels = draw(dtype=torch.float64)
    losses = (build(config, manifold).double() for manifold in (squared, cosine))
    by_chord, by_cosine = (value_and_gradient(loss, features, labels) for loss in losses)
    torch.testing.assert_close(by_chord, by_cosine, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("config", CONFIGS, ids=title)
def test_a_copy_learns_on_its_own(config: LossConfig):
    curved, (plain, *_) = Poincare.Config(learnable_curvature=True), fitting_manifolds(config)
    features, labels = draw()
    # PyTorch does not pickle a learned curvature.
    for space, copied in ((curved, deepcopy), (plain, lambda loss: pickle.loads(pickle.dumps(loss)))):
        if fits(config, space):
            expected = evaluate(build(config, space), features, labels)
            loss = build(config, space)
            copy = copied(loss)
            for parameter in loss.parameters():
                parameter.data.mul_(2)
            torch.testing.assert_close(evaluate(copy, features, labels), expected, rtol=0, atol=0)
