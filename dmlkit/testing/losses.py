"""The contracts of losses and of regularizers."""

import io
from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn

from dmlkit.losses.base import Loss, LossConfig
from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.regularizers import Regularizer, RegularizerConfig
from dmlkit.testing.loss_values import (
    BATCH,
    CLASSES,
    VALUES,
    a_step_never_waits_for_the_device,
    bad_batches,
    build,
    build_regularizer,
    build_term,
    degenerate_batches,
    draw,
    evaluate,
    expect_finite,
)
from dmlkit.testing.promise import (
    DIM,
    Promise,
    a_line_of_help_says_what_it_is,
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

    Raises:
        AssertionError: the contract is broken; the message says how.

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


def unbounded_options(config: LossConfig) -> Iterator[dict[str, float]]:
    """Yield every option that accepts 1e-3 and 1e3, with both: temperatures, scales, margins, weights."""
    for field, info in type(config).model_fields.items():
        options = [{field: 1e-3}, {field: 1e3}] if isinstance(info.default, float) else []
        if all(_accepts(config, option) for option in options):
            yield from options


def _accepts(config: LossConfig, option: dict[str, float]) -> bool:
    try:
        changed(config, **option)
    except ValueError:
        return False
    return True


def extreme_options_stay_finite(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that value and gradient are finite with each unbounded option at 0.001 and at 1000."""
    features, labels = draw()
    for option in unbounded_options(config):
        expect_finite(build(changed(config, **option), manifold), features, labels, str(option))


def a_hundred_thousand_classes_stay_finite(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that value and gradient are finite for 100 000 classes, and that these fit into memory."""
    # The regularizer of one loss compares all proxies with all classes: 1e11 logits.
    options = {"regularizer_weight": 0.0} if "regularizer_weight" in type(config).model_fields else {}
    features, labels = draw()
    expect_finite(build(changed(config, **options), manifold, classes=100_000), features, labels * 20_000)


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


def _value(term: Loss | Regularizer, points: Tensor, labels: Tensor) -> Tensor:
    torch.manual_seed(2)
    return term(points, labels)


def the_value_is_the_same_without_gradient(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that the value is the same under no_grad and inference_mode."""
    features, labels = draw()
    for mode in (torch.no_grad, torch.inference_mode):
        loss = build(config, manifold)
        expected = evaluate(deepcopy(loss), features, labels)[0]
        with mode():
            found = _value(loss, loss.manifold.from_features(features), labels)
            expect_close(found, expected, mode.__name__)


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
    expected, resumed = (_step(one, _optimizer(one), 77) for one in (loss, restored))  # the rest of the epoch
    expect(expected == resumed, f"the next step's value is {resumed}; without the checkpoint {expected}")
    expected, resumed = _train(loss, range(3, 5)), _train(restored, range(3, 5))
    expect(expected == resumed, f"the next epochs' values are {resumed}; without the checkpoint {expected}")


def bad_batches_are_refused(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that wrong shapes and dtypes, negative labels and nan raise a ValueError that names the error."""
    loss = build(config, manifold)
    for case, (points, labels, message) in bad_batches(loss.manifold).items():
        expect_refused(lambda points=points, labels=labels: loss(points, labels), ValueError, message, case)


def labels_out_of_range_are_refused(config: LossConfig, manifold: ManifoldConfig) -> None:
    """Check that a label beyond the classes raises a ValueError, if the loss has parameters per class."""
    loss = build(config, manifold)
    if loss.num_classes is None:
        return
    features, labels = draw()
    points, beyond = loss.manifold.from_features(features), labels + CLASSES - int(labels.max())
    message = rf"expected labels from 0 to {CLASSES - 1}, got {CLASSES}"
    expect_refused(lambda: loss(points, beyond), ValueError, message, f"label {CLASSES}")


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
    labels_out_of_range_are_refused,
    no_classes_are_refused,
    a_line_of_help_says_what_it_is,
)
"""Each takes a loss configuration and a suitable manifold configuration."""


def check_regularizer(config: RegularizerConfig) -> None:
    """Check a regularizer against its contract, on every manifold that its requirements allow.

    Its value is a finite scalar with finite gradients, also for degenerate batches; half precision is computed in
    float32; inputs are not changed, no step waits for a GPU, and its state_dict is complete.

    Raises:
        AssertionError: the contract is broken; the message says how.

    Example:
        >>> from dmlkit.regularizers import GraphConsistency
        >>> check_regularizer(GraphConsistency.Config())
    """
    for manifold in fitting_manifolds(config):
        hold(REGULARIZER, f"{config.name} on {title(manifold)}", config, manifold)


def value_is_a_finite_scalar(config: RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that the value is a finite scalar with a finite gradient by the embeddings and the parameters."""
    features, labels = draw()
    term = build_regularizer(config, manifold)
    value = _value(term, term.manifold.from_features(features), labels)
    expect(value.ndim == 0 and bool(value.isfinite()), f"got {value.tolist()}")
    expect(value.requires_grad, "the value has no gradient")
    learnable = [features, *(parameter for parameter in term.parameters() if parameter.requires_grad)]
    gradients = torch.autograd.grad(value, learnable, allow_unused=True, materialize_grads=True)
    expect(all(gradient.isfinite().all() for gradient in gradients), "the gradient has nan or inf")


def degenerate_batches_stay_finite(config: RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that value and gradient are finite for batches without positives or negatives, or of equal embeddings."""
    term = build_regularizer(config, manifold)
    for case, (features, labels) in degenerate_batches().items():
        value = _value(term, term.manifold.from_features(features.requires_grad_()), labels)
        expect(value.isfinite(), f"{case}: the value is {value.item()}")
        if value.requires_grad:  # a batch may have nothing to regularize
            gradients = torch.autograd.grad(value, features, allow_unused=True, materialize_grads=True)
            expect(gradients[0].isfinite().all(), f"{case}: the gradient has nan or inf")


def inputs_are_left_alone(config: RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that embeddings and labels are not changed."""
    features, labels = draw()
    term = build_regularizer(config, manifold)
    points = term.manifold.from_features(features).detach()
    copies = points.clone(), labels.clone()
    term(points, labels)
    expect(torch.equal(points, copies[0]), "embeddings have changed")
    expect(torch.equal(labels, copies[1]), "labels have changed")


def the_state_dict_is_complete(config: RegularizerConfig, manifold: ManifoldConfig) -> None:
    """Check that a regularizer restored from its state_dict gives an identical value."""
    features, labels = draw()
    term, restored = (build_regularizer(config, manifold) for _ in range(2))
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
    a_line_of_help_says_what_it_is,
)
"""Each takes a regularizer configuration and a manifold configuration."""
