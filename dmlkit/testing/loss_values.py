"""Checks of a loss's value and gradient, on every manifold that it supports."""

from copy import deepcopy
from unittest.mock import patch

import torch

from dmlkit.losses.base import LossConfig
from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.testing.loss_cases import (
    BATCH,
    CLASSES,
    build,
    degenerate_batches,
    draw,
    draws_at_random,
    evaluate,
    expect_finite,
)
from dmlkit.testing.promise import Promise, changed, expect, expect_close


def value_is_a_finite_scalar_that_pulls(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that the value is a finite scalar with a finite, non-zero gradient by the embeddings."""
    features, labels = draw()
    loss = build(config, manifold)
    value, gradients = evaluate(loss, features, labels)
    expect(value.ndim == 0, f"got a value of shape {tuple(value.shape)}")
    expect_finite(loss, features, labels)
    expect(gradients[0].abs().sum() > 0, "the gradient of the embeddings is 0")


def order_of_the_batch_does_not_matter(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that the order of the images in a batch changes nothing, unless the loss is random."""
    features, labels = draw(dtype=torch.float64)
    # A loss that groups images by their position in the batch gets one group.
    options = {"group_size": BATCH} if "group_size" in type(config).model_fields else {}
    loss = build(changed(config, **options), manifold).double()
    if draws_at_random(loss, features, labels):
        return
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))
    value, (gradient, *others) = evaluate(deepcopy(loss), features, labels)
    permuted, (permuted_gradient, *permuted_others) = evaluate(loss, features[order], labels[order])
    expect_close(permuted, value, "value")
    expect_close(permuted_gradient, gradient[order], "gradient of the embeddings")
    expect_close(permuted_others, others, "gradients of the parameters")


def numbering_of_the_classes_does_not_matter(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that renumbering the classes changes nothing, unless the loss is random."""
    features, labels = draw(dtype=torch.float64)
    loss = build(config, manifold).double()
    if draws_at_random(loss, features, labels):
        return
    order = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(3))
    renumbered = deepcopy(loss)
    per_class = {key: value for key, value in loss.state_dict().items() if value.shape[:1] == (CLASSES,)}
    renumbered.load_state_dict({**loss.state_dict(), **{key: value[order] for key, value in per_class.items()}})
    value, (gradient, *_) = evaluate(loss, features, labels)
    again, (again_gradient, *_) = evaluate(renumbered, features, order.argsort()[labels])
    expect_close(again, value, "value")
    expect_close(again_gradient, gradient, "gradient of the embeddings")


def degenerate_batches_stay_finite(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that value and gradient are finite for batches without positives or negatives, or of equal embeddings."""
    for case, (features, labels) in degenerate_batches().items():
        expect_finite(build(config, manifold), features.requires_grad_(), labels, case)


def classes_that_look_alike_stay_finite(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that value and gradient are finite if all proxies are equal, and for two classes."""
    loss = build(config, manifold)
    for parameter in loss.parameters(recurse=False):
        if parameter.ndim > 1:
            parameter.data.copy_(parameter.data.flatten(0, -2)[0].expand_as(parameter))
    features, labels = draw()
    expect_finite(loss, features, labels, "equal proxies")
    expect_finite(build(config, manifold, classes=2), features, labels % 2, "two classes")


def chunks_of_classes_change_nothing(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that chunk_size, if the loss has it, changes neither value nor gradient."""
    if "chunk_size" not in type(config).model_fields:
        return
    features, labels = draw(dtype=torch.float64)
    dense = evaluate(build(config, manifold).double(), features, labels)
    for size in (1, 7, CLASSES):
        chunked = evaluate(build(changed(config, chunk_size=size), manifold).double(), features, labels)
        expect_close(chunked, dense, f"chunks of {size}", rtol=1e-9, atol=1e-11)


def a_step_never_waits_for_the_device(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that no step reads a value from a GPU: tensors of the meta device have none, so reading fails here."""
    loss = build(config, manifold).to("meta")
    features, labels = (part.detach().to("meta") for part in draw())
    features.requires_grad_()
    with patch.object(torch, "is_autocast_enabled", return_value=False):  # it does not support this device
        for epoch in range(3):  # memories and filters start at later epochs
            loss.set_epoch(epoch)
            loss(loss.manifold.from_features(features), labels).backward()
    expect(features.grad is not None and features.grad.shape == features.shape, "the embeddings have no gradient")


VALUES: tuple[Promise, ...] = (
    value_is_a_finite_scalar_that_pulls,
    order_of_the_batch_does_not_matter,
    numbering_of_the_classes_does_not_matter,
    degenerate_batches_stay_finite,
    classes_that_look_alike_stay_finite,
    chunks_of_classes_change_nothing,
    a_step_never_waits_for_the_device,
)
"""Each takes a loss configuration and a manifold configuration."""
