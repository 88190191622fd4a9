"""The contracts of losses and of regularizers."""

import io
from copy import deepcopy
from unittest.mock import patch

import torch
from torch import Tensor, nn

from dmlkit.losses.base import Loss, LossConfig
from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.regularizers import Regularizer, RegularizerConfig
from dmlkit.testing.promise import (
    DIM,
    Promise,
    all_manifolds,
    changed,
    expect,
    expect_close,
    expect_refused,
    fits,
    fitting_manifolds,
    hold,
    title,
)


def check_loss(config: LossConfig) -> None:
    """Check a loss against its contract, on every manifold that its requirements allow.

    Values and gradients are finite, also for degenerate batches and extreme options; neither the order of the batch nor
    the numbering of the classes matters; half precision is computed in float32; a loss restored from a checkpoint
    continues identically; no step waits for a GPU; invalid batches and other manifolds raise errors.

    Example:
        >>> from dmlkit.losses import Contrastive
        >>> check_loss(Contrastive.Config())
    """
    manifolds = fitting_manifolds(config)
    for manifold in manifolds:
        hold(VALUES, f"{config.name} on {title(manifold)}", config, manifold)
    hold(TRAINING, config.name, config, manifolds[0])
    for manifold in all_manifolds():
        if not fits(config, manifold):
            hold([other_manifolds_are_refused], f"{config.name} on {title(manifold)}", config, manifold)


def value_is_a_finite_scalar(config: LossConfig | RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that the value is a finite scalar with a finite gradient, of which a loss has one by the embeddings."""
    value, gradients = expect_finite(build_term(config, manifold), *draw(), "a batch")
    expect(value.ndim == 0, f"got a value of shape {tuple(value.shape)}")
    expect(bool(gradients), "the value has no gradient")
    is_regularizer = isinstance(config, RegularizerConfig)
    expect(is_regularizer or bool(gradients[0].any()), "the gradient of the embeddings is 0")


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


def degenerate_batches_stay_finite(config: LossConfig | RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that value and gradient are finite for batches without positives or negatives, or of equal embeddings."""
    features = torch.randn(6, DIM, generator=torch.Generator().manual_seed(4))
    in_pairs = torch.tensor([0, 0, 1, 1, 2, 2])
    batches = {
        "one class": (features, torch.zeros(6, dtype=torch.int64)),
        "no positives": (features, torch.arange(6)),
        "one image": (features[:1], torch.tensor([1])),
        "one image each of two classes": (features[:2], torch.tensor([1, 0])),
        "identical embeddings": (torch.ones(6, DIM), in_pairs),
        "identical embeddings of one class": (torch.ones(6, DIM), torch.zeros(6, dtype=torch.int64)),
        "zero vectors": (torch.zeros(6, DIM), in_pairs),
        "a zero vector": (features * torch.arange(6)[:, None].sign(), in_pairs),
        "huge vectors": (features * 1e4, in_pairs),
    }
    for case, (points, labels) in batches.items():
        expect_finite(build_term(config, manifold), points.requires_grad_(), labels, case)


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
    features, labels = (tensor.detach().to("meta") for tensor in draw())
    features.requires_grad_()
    with patch.object(torch, "is_autocast_enabled", return_value=False):  # it does not support this device
        for epoch in range(3):  # memories and filters start at later epochs
            if isinstance(loss, Loss):
                loss.set_epoch(epoch)
            loss(loss.manifold.from_features(features), labels).backward()
    expect(features.grad is not None and features.grad.shape == features.shape, "the embeddings have no gradient")


VALUES: tuple[Promise, ...] = (
    value_is_a_finite_scalar,
    order_of_the_batch_does_not_matter,
    numbering_of_the_classes_does_not_matter,
    degenerate_batches_stay_finite,
    classes_that_look_alike_stay_finite,
    chunks_of_classes_change_nothing,
    a_step_never_waits_for_the_device,
)
"""Each takes a loss configuration and a manifold configuration."""


def extreme_options_stay_finite(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that value and gradient are finite with each option that accepts both at 0.001 and at 1000."""
    features, labels = draw()
    for field, info in type(config).model_fields.items():
        values = (1e-3, 1e3) if isinstance(info.default, float) else ()  # temperatures, scales, margins, weights
        try:
            extremes = [changed(config, **{field: value}) for value in values]
        except ValueError:
            continue
        for value, extreme in zip(values, extremes, strict=True):
            expect_finite(build(extreme, manifold), features, labels, f"{field} {value}")


def a_hundred_thousand_classes_stay_finite(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that value and gradient are finite for 100 000 classes, and that these fit into memory."""
    # The regularizer of one loss compares all proxies with all classes: 1e11 logits.
    options = {"regularizer_weight": 0.0} if "regularizer_weight" in type(config).model_fields else {}
    features, labels = draw()
    loss = build(changed(config, **options), manifold, classes=100_000)
    expect_finite(loss, features, labels * 20_000, "100 000 classes")


def half_precision_is_computed_in_full(config: LossConfig | RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that half-precision embeddings under autocast give exactly the value of their float32 copies."""
    features, labels = draw()
    for dtype in (torch.float16, torch.bfloat16):
        loss = build_term(config, manifold)
        half = loss.manifold.from_features(features).detach().to(dtype)
        full = _value(deepcopy(loss), half.float(), labels)
        with torch.autocast("cpu", dtype=dtype):
            mixed = _value(loss, half, labels)
        expect(mixed.dtype == torch.float32, f"{dtype}: got a value in {mixed.dtype}")
        expect(torch.equal(mixed, full), f"{dtype}: got {mixed.item()}, expected {full.item()} as in float32")


def the_value_is_the_same_without_gradient(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that the value is the same under no_grad and inference_mode."""
    features, labels = draw()
    for mode in (torch.no_grad, torch.inference_mode):
        loss = build(config, manifold)
        expected = evaluate(deepcopy(loss), features, labels)[0]
        with mode():
            value = _value(loss, loss.manifold.from_features(features), labels)
            expect_close(value, expected, mode.__name__)


def _train(loss: Loss, epochs: range) -> list[float]:
    """Take two steps of SGD per epoch, with batches that depend only on the epoch."""
    values: list[float] = []
    optimizer = _optimizer(loss)
    for epoch in epochs:
        loss.set_epoch(epoch)
        values += [_step(loss, optimizer, seed) for seed in (10 * epoch, 10 * epoch + 1)]
    return values


def _optimizer(loss: Loss) -> torch.optim.Optimizer:
    return torch.optim.SGD([*loss.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)


def _step(loss: Loss, optimizer: torch.optim.Optimizer, seed: int) -> float:
    torch.manual_seed(seed)
    labels = torch.arange(BATCH) // 3
    value = loss(loss.manifold.from_features(torch.randn(BATCH, DIM).requires_grad_()), labels)
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    return value.item()


def a_checkpoint_in_mid_training_changes_nothing(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that a loss restored from its state_dict within an epoch continues with identical values."""
    loss = build(config, manifold)
    _train(loss, range(3))
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    restored = config.build(manifold.build(DIM), CLASSES)
    restored.load_state_dict(torch.load(file, weights_only=True))
    expected, resumed = (_step(term, _optimizer(term), 77) for term in (loss, restored))  # the rest of the epoch
    expect(expected == resumed, f"the next step's value is {resumed}; without the checkpoint {expected}")
    expected, resumed = _train(loss, range(3, 5)), _train(restored, range(3, 5))
    expect(expected == resumed, f"the next epochs' values are {resumed}; without the checkpoint {expected}")


def bad_batches_are_refused(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that wrong shapes and dtypes, negative labels and nan raise a ValueError that names the error."""
    loss = build(config, manifold)
    features, labels = draw()
    points = loss.manifold.from_features(features).detach()
    row = torch.arange(BATCH)[:, None]
    batches = {
        "negative label": (points, labels - 1, "got -1"),
        "float labels": (points, labels.float(), "expected int64 labels, got torch.float32"),
        "int32 labels": (points, labels.int(), "expected int64 labels, got torch.int32"),
        "too few labels": (points, labels[1:], r"expected labels of shape \(12,\), got \(11,\)"),
        "labels of two dimensions": (points, labels[:, None], r"got \(12, 1\)"),
        "narrow": (points[:, 1:], labels, rf"expected embeddings of shape \(B, {loss.manifold.point_dim}\)"),
        "wide": (torch.cat([points, points], 1), labels, "expected embeddings of shape"),
        "one dimension": (points[0], labels, "expected embeddings of shape"),
        "empty": (points[:0], labels[:0], "at least one embedding"),
        "integers": (points.long(), labels, "floating-point"),
        "nan": (points.where(row != 3, torch.nan), labels, "row 3"),
        "infinite": (points.where(row != 5, torch.inf), labels, "row 5"),
    }
    if loss.num_classes is not None:
        beyond = labels + CLASSES - int(labels.max())
        message = rf"expected labels from 0 to {CLASSES - 1}, got {CLASSES}"
        batches[f"label {CLASSES}"] = (points, beyond, message)
    for case, (points, labels, message) in batches.items():
        expect_refused(lambda points=points, labels=labels: loss(points, labels), ValueError, message, case)


def no_classes_are_refused(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that zero classes raise a ValueError, if the loss has parameters per class."""
    if build(config, manifold).num_classes is not None:
        message = "num_classes must be at least 1, got 0"
        expect_refused(lambda: build(config, manifold, classes=0), ValueError, message, "no classes")


def other_manifolds_are_refused(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that a manifold excluded by the requirements raises a ValueError that says what was expected."""
    message = r": expected .*; got|: expected .*, got"
    expect_refused(lambda: build(config, manifold), ValueError, message, "another manifold")


TRAINING: tuple[Promise, ...] = (
    extreme_options_stay_finite,
    a_hundred_thousand_classes_stay_finite,
    half_precision_is_computed_in_full,
    the_value_is_the_same_without_gradient,
    a_checkpoint_in_mid_training_changes_nothing,
    bad_batches_are_refused,
    no_classes_are_refused,
)
"""Each takes a loss configuration and a suitable manifold configuration."""


def check_regularizer(config: RegularizerConfig) -> None:
    """Check a regularizer against its contract, on every manifold that its requirements allow.

    Its value is a finite scalar with finite gradients, also for degenerate batches; half precision is computed in
    float32; inputs are not changed, no step waits for a GPU, and its state_dict is complete.

    Example:
        >>> from dmlkit.regularizers import GraphConsistency
        >>> check_regularizer(GraphConsistency.Config())
    """
    for manifold in fitting_manifolds(config):
        hold(REGULARIZER, f"{config.name} on {title(manifold)}", config, manifold)


def inputs_are_left_alone(config: RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that embeddings and labels are not changed."""
    features, labels = draw()
    term = build_term(config, manifold)
    points = term.manifold.from_features(features).detach()
    copies = points.clone(), labels.clone()
    term(points, labels)
    expect(torch.equal(points, copies[0]), "embeddings have changed")
    expect(torch.equal(labels, copies[1]), "labels have changed")


def the_state_dict_is_complete(config: RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that a regularizer restored from its state_dict gives an identical value."""
    features, labels = draw()
    term, restored = (build_term(config, manifold) for _ in range(2))
    for parameter in term.parameters():
        parameter.data.add_(0.1)
    restored.load_state_dict(term.state_dict())
    points = term.manifold.from_features(features)
    expect(torch.equal(_value(restored, points, labels), _value(term, points, labels)), "values differ")


REGULARIZER: tuple[Promise, ...] = (
    value_is_a_finite_scalar,
    degenerate_batches_stay_finite,
    half_precision_is_computed_in_full,
    inputs_are_left_alone,
    a_step_never_waits_for_the_device,
    the_state_dict_is_complete,
)
"""Each takes a regularizer configuration and a manifold configuration."""


CLASSES, BATCH = 30, 12


def draw(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return features (B, d) and labels (B,) with several images per class, as the pair losses need."""
    features = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    return features.requires_grad_(), torch.arange(BATCH) // 3


def build(config: LossConfig, manifold: ManifoldConfig, classes: int = CLASSES) -> Loss:
    """Build the loss, with the same proxies at each call."""
    torch.manual_seed(1)
    return config.build(manifold.build(DIM), classes)


def build_term(config: LossConfig | RegularizerConfig, manifold: ManifoldConfig) -> Loss | Regularizer:
    """Build a loss or a regularizer; one that learns from a run gets drawn points, the same at each call."""
    if isinstance(config, LossConfig):
        return build(config, manifold)
    term = config.build(manifold.build(DIM))
    if config.source_run() is not None:
        features = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(3))
        term.learn_from(term.manifold.from_features(features).detach(), torch.arange(CLASSES))
    return term


def evaluate(term: Loss | Regularizer, features: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the value and the gradients by features and all parameters, with a fixed seed."""
    value = _value(term, term.manifold.from_features(features), labels)
    if isinstance(term, Regularizer) and not value.requires_grad:  # a batch may have nothing to regularize
        return value, []
    learnable = [features, *(parameter for parameter in term.parameters() if parameter.requires_grad)]
    gradients = torch.autograd.grad(value, learnable, allow_unused=True, materialize_grads=True)
    return value.detach(), list(gradients)


def _value(term: Loss | Regularizer, points: Tensor, labels: Tensor) -> Tensor:
    torch.manual_seed(2)
    return term(points, labels)


def expect_finite(term: Loss | Regularizer, features: Tensor, labels: Tensor, what: str) -> tuple[Tensor, list[Tensor]]:
    """Check that the value and the gradients of a batch are finite, and return them."""
    value, gradients = evaluate(term, features, labels)
    expect(value.isfinite().all(), f"{what}: the value is {value.tolist()}")
    expect(all(gradient.isfinite().all() for gradient in gradients), f"{what}: a gradient has nan or inf")
    return value, gradients


def draws_at_random(loss: Loss, features: Tensor, labels: Tensor) -> bool:
    """Return whether the value depends on the random seed."""
    values: set[float] = set()
    for seed in range(3):
        torch.manual_seed(seed)
        values.add(deepcopy(loss)(loss.manifold.from_features(features), labels).item())
    return len(values) > 1
