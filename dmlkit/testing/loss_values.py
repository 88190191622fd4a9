"""Checks of a loss's value and gradient, on every manifold that it supports."""

from copy import deepcopy
from unittest.mock import patch

import torch
from torch import Tensor

from dmlkit.losses.base import Loss, LossConfig
from dmlkit.manifolds.base import Manifold, ManifoldConfig
from dmlkit.regularizers import Regularizer, RegularizerConfig
from dmlkit.testing.promise import DIM, Promise, changed, expect, expect_close


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


def a_step_never_waits_for_the_device(config: LossConfig | RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that no step reads a value from a GPU: tensors of the meta device have none, so reading fails here."""
    loss = build_term(config, manifold).to("meta")
    features, labels = (part.detach().to("meta") for part in draw())
    features.requires_grad_()
    with patch.object(torch, "is_autocast_enabled", return_value=False):  # it does not support this device
        for epoch in range(3):  # memories and filters start at later epochs
            if isinstance(loss, Loss):
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


CLASSES, BATCH = 30, 12


def draw(classes: int = CLASSES, batch: int = BATCH, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return features (B, d) and labels (B,) with several images per class, as the pair losses need."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(batch, DIM, generator=generator).to(dtype)
    labels = (torch.arange(batch) // 3) % classes
    return features.requires_grad_(), labels


def degenerate_batches() -> dict[str, tuple[Tensor, Tensor]]:
    """Return features and labels that occasionally occur in training, by description."""
    generator = torch.Generator().manual_seed(4)

    def features(count: int) -> Tensor:
        return torch.randn(count, DIM, generator=generator)

    in_pairs = torch.tensor([0, 0, 1, 1, 2, 2])
    return {
        "one class": (features(6), torch.zeros(6, dtype=torch.int64)),
        "no positives": (features(6), torch.arange(6)),
        "one image": (features(1), torch.tensor([1])),
        "one image each of two classes": (features(2), torch.tensor([1, 0])),
        "identical embeddings": (torch.ones(6, DIM), in_pairs),
        "identical embeddings of one class": (torch.ones(6, DIM), torch.zeros(6, dtype=torch.int64)),
        "zero vectors": (torch.zeros(6, DIM), in_pairs),
        "a zero vector": (features(6) * torch.arange(6)[:, None].sign(), in_pairs),
        "huge vectors": (features(6) * 1e4, in_pairs),
    }


def bad_batches(manifold: Manifold) -> dict[str, tuple[Tensor, Tensor, str]]:
    """Return invalid points and labels, each with a pattern of the error message."""
    features, labels = draw()
    points = manifold.from_features(features).detach()
    spoiled = points.clone()
    spoiled[3, 0] = torch.nan
    infinite = points.clone()
    infinite[5, 1] = torch.inf
    return {
        "negative label": (points, labels - 1, "got -1"),
        "float labels": (points, labels.float(), "expected int64 labels, got torch.float32"),
        "int32 labels": (points, labels.int(), "expected int64 labels, got torch.int32"),
        "too few labels": (points, labels[1:], r"expected labels of shape \(12,\), got \(11,\)"),
        "labels of two dimensions": (points, labels[:, None], r"got \(12, 1\)"),
        "narrow": (points[:, 1:], labels, rf"expected embeddings of shape \(B, {manifold.point_dim}\)"),
        "wide": (torch.cat([points, points], 1), labels, "expected embeddings of shape"),
        "one dimension": (points[0], labels, "expected embeddings of shape"),
        "empty": (points[:0], labels[:0], "at least one embedding"),
        "integers": (points.long(), labels, "floating-point"),
        "nan": (spoiled, labels, "row 3"),
        "infinite": (infinite, labels, "row 5"),
    }


def build(config: LossConfig, manifold: ManifoldConfig, classes: int = CLASSES) -> Loss:
    """Build the loss, with the same proxies at each call."""
    torch.manual_seed(1)
    return config.build(manifold.build(DIM), classes)


def build_regularizer(config: RegularizerConfig, manifold: ManifoldConfig) -> Regularizer:
    """Build a regularizer; one that learns from a run gets drawn points, the same at each call."""
    term = config.build(manifold.build(DIM))
    if config.source_run() is not None:
        features = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(3))
        term.learn_from(term.manifold.from_features(features).detach(), torch.arange(CLASSES))
    return term


def build_term(config: LossConfig | RegularizerConfig, manifold: ManifoldConfig) -> Loss | Regularizer:
    """Build a loss or a regularizer."""
    return build(config, manifold) if isinstance(config, LossConfig) else build_regularizer(config, manifold)


def evaluate(loss: Loss, features: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the value and the gradients by features and all parameters, with a fixed seed."""
    torch.manual_seed(2)
    value = loss(loss.manifold.from_features(features), labels)
    learnable = [features, *(parameter for parameter in loss.parameters() if parameter.requires_grad)]
    gradients = torch.autograd.grad(value, learnable, allow_unused=True, materialize_grads=True)
    return value.detach(), list(gradients)


def expect_finite(loss: Loss, features: Tensor, labels: Tensor, what: str = "a batch") -> None:
    """Check that the value and the gradients of a batch are finite."""
    value, gradients = evaluate(loss, features, labels)
    expect(value.isfinite(), f"{what}: the value is {value.item()}")
    expect(all(gradient.isfinite().all() for gradient in gradients), f"{what}: a gradient has nan or inf")


def draws_at_random(loss: Loss, features: Tensor, labels: Tensor) -> bool:
    """Return whether the value depends on the random seed."""
    values: set[float] = set()
    for seed in range(3):
        torch.manual_seed(seed)
        values.add(deepcopy(loss)(loss.manifold.from_features(features), labels).item())
    return len(values) > 1
