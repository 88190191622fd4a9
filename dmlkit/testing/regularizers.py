"""The contract of regularizers."""

from unittest.mock import patch

import torch
from torch import Tensor

from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.regularizers import Regularizer, RegularizerConfig
from dmlkit.testing.loss_values import degenerate_batches, draw
from dmlkit.testing.promise import DIM, Promise, a_line_of_help_says_what_it_is, expect, fitting_manifolds, hold, title


def check_regularizer(config: RegularizerConfig) -> None:
    """Check a regularizer against its contract, on every manifold that its requirements allow.

    Its value is a finite scalar with finite gradients, also for degenerate batches; half precision is computed in
    float32; inputs are not changed, no step waits for a GPU, and its state_dict is complete.

    Raises:
        AssertionError: the contract is broken; the message says how.

    Example:
        >>> from dmlkit.regularizers import GraphConsistencyConfig
        >>> check_regularizer(GraphConsistencyConfig())
    """
    for manifold in fitting_manifolds(config):
        hold(REGULARIZER, f"{config.name} on {title(manifold)}", config, manifold)


def _value(term: Regularizer, features: Tensor, labels: Tensor) -> Tensor:
    torch.manual_seed(2)
    return term(term.manifold.from_features(features), labels)


def value_is_a_finite_scalar(config: RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that the value is a finite scalar with a finite gradient by the embeddings and the parameters."""
    features, labels = draw()
    term = config.build(manifold.build(DIM))
    value = _value(term, features, labels)
    expect(value.ndim == 0 and bool(value.isfinite()), f"got {value.tolist()}")
    expect(value.requires_grad, "the value has no gradient")
    learnable = [features, *(parameter for parameter in term.parameters() if parameter.requires_grad)]
    gradients = torch.autograd.grad(value, learnable, allow_unused=True, materialize_grads=True)
    expect(all(gradient.isfinite().all() for gradient in gradients), "the gradient has nan or inf")


def degenerate_batches_stay_finite(config: RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that value and gradient are finite for batches without positives or negatives, or of equal embeddings."""
    term = config.build(manifold.build(DIM))
    for case, (features, labels) in degenerate_batches().items():
        value = _value(term, features.requires_grad_(), labels)
        expect(value.isfinite(), f"{case}: the value is {value.item()}")
        if value.requires_grad:  # a batch may have nothing to regularize
            gradients = torch.autograd.grad(value, features, allow_unused=True, materialize_grads=True)
            expect(gradients[0].isfinite().all(), f"{case}: the gradient has nan or inf")


def half_precision_is_computed_in_full(config: RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that bfloat16 embeddings under autocast give exactly the value of their float32 copies."""
    features, labels = draw()
    term = config.build(manifold.build(DIM))
    half = term.manifold.from_features(features).detach().bfloat16()
    torch.manual_seed(2)
    full = term(half.float(), labels)
    torch.manual_seed(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = term(half, labels)
    expect(mixed.dtype == torch.float32, f"got a value in {mixed.dtype}")
    expect(torch.equal(mixed, full), f"got {mixed.item()}, expected {full.item()} as in float32")


def inputs_are_left_alone(config: RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that embeddings and labels are not changed."""
    features, labels = draw()
    term = config.build(manifold.build(DIM))
    points = term.manifold.from_features(features).detach()
    copies = points.clone(), labels.clone()
    term(points, labels)
    expect(torch.equal(points, copies[0]), "embeddings have changed")
    expect(torch.equal(labels, copies[1]), "labels have changed")


def a_step_never_waits_for_the_device(config: RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that no step reads a value from a GPU: tensors of the meta device have none, so reading fails here."""
    term = config.build(manifold.build(DIM)).to("meta")
    features, labels = (part.detach().to("meta") for part in draw())
    features.requires_grad_()
    with patch.object(torch, "is_autocast_enabled", return_value=False):  # it does not support this device
        term(term.manifold.from_features(features), labels).backward()
    expect(features.grad is not None and features.grad.shape == features.shape, "the embeddings have no gradient")


def the_state_dict_is_complete(config: RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that a regularizer restored from its state_dict gives an identical value."""
    features, labels = draw()
    term, restored = (config.build(manifold.build(DIM)) for _ in range(2))
    for parameter in term.parameters():
        parameter.data.add_(0.1)
    restored.load_state_dict(term.state_dict())
    expect(torch.equal(_value(restored, features, labels), _value(term, features, labels)), "values differ")


REGULARIZER: tuple[Promise, ...] = (
    value_is_a_finite_scalar,
    degenerate_batches_stay_finite,
    half_precision_is_computed_in_full,
    inputs_are_left_alone,
    a_step_never_waits_for_the_device,
    the_state_dict_is_complete,
    a_line_of_help_says_what_it_is,
)
"""Each takes a regularizer configuration and a manifold configuration."""
