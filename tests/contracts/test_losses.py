"""What every loss promises, over every loss that there is and every manifold that it takes."""

import inspect
import io
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import dmlkit.losses
import dmlkit.manifolds
from dmlkit.component import ComponentConfig, Requirement
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.manifolds.base import Manifold, ManifoldConfig

pytestmark = pytest.mark.filterwarnings("ignore:ProxyGML")  # k < N at a few classes
DIM, CLASSES, BATCH = 8, 30, 12


def manifold_choices() -> Iterator[ManifoldConfig]:
    for variant in ManifoldConfig.variants.values():
        for similarity in get_args(variant.model_fields["similarity"].annotation):
            yield variant(similarity=similarity)


def requirements(part: ComponentConfig) -> Iterator[Requirement]:
    """Of a component and of those nested in it, such as a miner."""
    yield from part.requirements()
    for value in dict(part).values():
        if isinstance(value, ComponentConfig):
            yield from requirements(value)


def fits(loss: LossConfig, manifold: ManifoldConfig) -> bool:
    needs = [need for need in requirements(loss) if need.key.startswith("manifold.")]
    return all(getattr(manifold, need.key.removeprefix("manifold."), None) in need.allowed for need in needs)


def label(config: ComponentConfig) -> str:
    return "-".join(filter(None, (config.name, getattr(config, "similarity", None))))


LOSSES = sorted(LossConfig.variants)
PAIRS = [
    pytest.param(name, manifold, id=f"{name}-{label(manifold)}")
    for name in LOSSES
    for manifold in manifold_choices()
    if fits(LossConfig.variants[name](), manifold)
]
REFUSED = [
    pytest.param(name, manifold, id=f"{name}-{label(manifold)}")
    for name in LOSSES
    for manifold in manifold_choices()
    if not fits(LossConfig.variants[name](), manifold)
]
EVERY_LOSS = pytest.mark.parametrize("name", LOSSES)
EVERY_PAIR = pytest.mark.parametrize(("name", "manifold_config"), PAIRS)


def a_manifold(name: str) -> ManifoldConfig:
    """The first manifold that a loss takes, the sphere if it can."""
    choices = [choice for choice in manifold_choices() if fits(LossConfig.variants[name](), choice)]
    return min(choices, key=lambda choice: (choice.name != "sphere", label(choice)))


def build(name: str, manifold: ManifoldConfig | None = None, classes: int = CLASSES, **options: Any) -> Loss:
    torch.manual_seed(1)
    config = LossConfig.variants[name](**options)
    return config.build((manifold or a_manifold(name)).build(DIM), classes)


def draw(classes: int = CLASSES, batch: int = BATCH, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Features (B, d) and labels (B,) with several images of a class, as the pair losses need."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(batch, DIM, generator=generator).to(dtype)
    labels = (torch.arange(batch) // 3) % classes
    return features.requires_grad_(), labels


def evaluate(loss: Loss, features: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Value, and gradients with respect to the features and everything learnable. Losses that draw, draw the same."""
    torch.manual_seed(2)
    value = loss(loss.manifold.from_features(features), labels)
    learnable = [features, *(parameter for parameter in loss.parameters() if parameter.requires_grad)]
    gradients = torch.autograd.grad(value, learnable, allow_unused=True, materialize_grads=True)
    return value.detach(), list(gradients)


def assert_finite(loss: Loss, features: Tensor, labels: Tensor) -> None:
    value, gradients = evaluate(loss, features, labels)
    assert value.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


def draws_at_random(loss: Loss, features: Tensor, labels: Tensor) -> bool:
    values: set[float] = set()
    for seed in range(3):
        torch.manual_seed(seed)
        values.add(deepcopy(loss)(loss.manifold.from_features(features), labels).item())
    return len(values) > 1


@EVERY_PAIR
def test_value_and_gradient_are_finite_and_pull_the_embeddings(name: str, manifold_config: ManifoldConfig):
    features, labels = draw()
    loss = build(name, manifold_config)
    value, gradients = evaluate(loss, features, labels)
    assert value.ndim == 0 and value.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0].abs().sum() > 0


@EVERY_PAIR
def test_order_of_the_batch_does_not_matter(name: str, manifold_config: ManifoldConfig):
    features, labels = draw(dtype=torch.float64)
    # A loss that groups images by their place in the batch gets one group.
    options = {"group_size": BATCH} if "group_size" in LossConfig.variants[name].model_fields else {}
    loss = build(name, manifold_config, **options).double()
    if draws_at_random(loss, features, labels):
        pytest.skip("draws pairs at random")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))
    value, (gradient, *others) = evaluate(deepcopy(loss), features, labels)
    permuted, (permuted_gradient, *permuted_others) = evaluate(loss, features[order], labels[order])
    torch.testing.assert_close(permuted, value)
    torch.testing.assert_close(permuted_gradient, gradient[order])
    torch.testing.assert_close(permuted_others, others)


@EVERY_PAIR
def test_numbering_of_the_classes_does_not_matter(name: str, manifold_config: ManifoldConfig):
    features, labels = draw(dtype=torch.float64)
    loss = build(name, manifold_config).double()
    if draws_at_random(loss, features, labels):
        pytest.skip("draws pairs at random")
    order = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(3))
    renumbered = deepcopy(loss)
    per_class = {key: value for key, value in loss.state_dict().items() if value.shape[:1] == (CLASSES,)}
    renumbered.load_state_dict({**loss.state_dict(), **{key: value[order] for key, value in per_class.items()}})
    value, (gradient, *_) = evaluate(loss, features, labels)
    again, (again_gradient, *_) = evaluate(renumbered, features, order.argsort()[labels])
    torch.testing.assert_close(again, value)
    torch.testing.assert_close(again_gradient, gradient)


DEGENERATE = {
    "one class": (torch.randn(6, DIM), torch.zeros(6, dtype=torch.int64)),
    "no positives": (torch.randn(6, DIM), torch.arange(6)),
    "one image": (torch.randn(1, DIM), torch.tensor([1])),
    "one image each of two classes": (torch.randn(2, DIM), torch.tensor([1, 0])),
    "identical embeddings": (torch.ones(6, DIM), torch.tensor([0, 0, 1, 1, 2, 2])),
    "identical embeddings of one class": (torch.ones(6, DIM), torch.zeros(6, dtype=torch.int64)),
    "zero vectors": (torch.zeros(6, DIM), torch.tensor([0, 0, 1, 1, 2, 2])),
    "a zero vector": (torch.randn(6, DIM) * torch.arange(6)[:, None].sign(), torch.tensor([0, 0, 1, 1, 2, 2])),
    "huge vectors": (torch.randn(6, DIM) * 1e4, torch.tensor([0, 0, 1, 1, 2, 2])),
}


@EVERY_PAIR
@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_batches_stay_finite(name: str, manifold_config: ManifoldConfig, case: str):
    features, labels = DEGENERATE[case]
    assert_finite(build(name, manifold_config), features.clone().requires_grad_(), labels)


@EVERY_PAIR
def test_classes_that_look_alike_stay_finite(name: str, manifold_config: ManifoldConfig):
    loss = build(name, manifold_config)
    for parameter in loss.parameters(recurse=False):
        if parameter.ndim > 1:
            parameter.data.copy_(parameter.data.flatten(0, -2)[0].expand_as(parameter))
    features, labels = draw()
    assert_finite(loss, features, labels)
    assert_finite(build(name, manifold_config, classes=2), features, labels % 2)


def unbounded_options() -> Iterator[Any]:
    """Every option that may be 1e-3 and 1e3: temperatures, scales, margins, weights."""
    for name in LOSSES:
        for field, info in LossConfig.variants[name].model_fields.items():
            choices = [{field: 1e-3}, {field: 1e3}] if isinstance(info.default, float) else []
            if all(accepts(LossConfig.variants[name], options) for options in choices):
                for options in choices:
                    yield pytest.param(name, options, id=f"{name}-{field}={options[field]:g}")


def accepts(config: type[LossConfig], options: dict[str, float]) -> bool:
    try:
        config(**options)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("name", "options"), unbounded_options())
def test_extreme_temperatures_stay_finite(name: str, options: dict[str, float]):
    features, labels = draw()
    assert_finite(build(name, **options), features, labels)


@EVERY_LOSS
def test_a_hundred_thousand_classes(name: str):
    # Every proxy against every class is 1e11 logits, for the one loss whose regularizer does that.
    options = {"regularizer_weight": 0.0} if "regularizer_weight" in LossConfig.variants[name].model_fields else {}
    features, labels = draw()
    assert_finite(build(name, classes=100_000, **options), features, labels * 20_000)


@EVERY_LOSS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_full(name: str, dtype: torch.dtype):
    features, labels = draw()
    loss = build(name)
    half = loss.manifold.from_features(features).detach().to(dtype)
    full = evaluate_points(deepcopy(loss), half.float(), labels)
    with torch.autocast("cpu", dtype=dtype):
        mixed = evaluate_points(loss, half, labels)
    assert mixed.dtype == torch.float32
    assert torch.equal(mixed, full)


def evaluate_points(loss: Loss, points: Tensor, labels: Tensor) -> Tensor:
    torch.manual_seed(2)
    return loss(points, labels).detach()


CHUNKED = [pair for pair in PAIRS if "chunk_size" in LossConfig.variants[pair.values[0]].model_fields]


@pytest.mark.parametrize(("name", "manifold_config"), CHUNKED)
def test_chunks_of_classes_change_nothing(name: str, manifold_config: ManifoldConfig):
    features, labels = draw(dtype=torch.float64)
    dense = evaluate(build(name, manifold_config).double(), features, labels)
    for size in (1, 7, CLASSES):
        chunked = evaluate(build(name, manifold_config, chunk_size=size).double(), features, labels)
        torch.testing.assert_close(chunked, dense, rtol=1e-9, atol=1e-11)


def train(loss: Loss, epochs: range) -> list[float]:
    """Two steps of SGD an epoch, with batches that depend on the epoch alone."""
    values: list[float] = []
    optimizer = torch.optim.SGD([*loss.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)
    for epoch in epochs:
        loss.set_epoch(epoch)
        values += [step(loss, optimizer, seed) for seed in (10 * epoch, 10 * epoch + 1)]
    return values


def step(loss: Loss, optimizer: torch.optim.Optimizer, seed: int) -> float:
    torch.manual_seed(seed)
    labels = torch.arange(BATCH) // 3
    value = loss(loss.manifold.from_features(torch.randn(BATCH, DIM).requires_grad_()), labels)
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    return value.item()


@EVERY_LOSS
def test_a_checkpoint_in_mid_training_changes_nothing(name: str):
    loss = build(name)
    train(loss, range(3))
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    restored = LossConfig.variants[name]().build(a_manifold(name).build(DIM), CLASSES)
    restored.load_state_dict(torch.load(file, weights_only=True))
    optimizers = [
        torch.optim.SGD([*one.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1) for one in (loss, restored)
    ]
    assert step(loss, optimizers[0], 77) == step(restored, optimizers[1], 77)  # the rest of the epoch
    assert train(loss, range(3, 5)) == train(restored, range(3, 5))


@EVERY_LOSS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_value_is_the_same_without_gradient(name: str, mode: Any):
    features, labels = draw()
    loss = build(name)
    expected = evaluate(deepcopy(loss), features, labels)[0]
    with mode():
        torch.testing.assert_close(evaluate_points(loss, loss.manifold.from_features(features), labels), expected)


@EVERY_LOSS
def test_constructor_and_config_have_the_same_defaults(name: str):
    config = LossConfig.variants[name]()
    values = {field: getattr(config, field) for field in type(config).model_fields if field != "name"}
    parts = {field for field, value in values.items() if isinstance(value, ComponentConfig)}  # built, often positional
    parts |= {"scope"}  # chooses what is built
    parameters = inspect.signature(type(build(name))).parameters.values()
    options = {
        parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert {key: value for key, value in options.items() if key not in parts} == {
        key: value for key, value in values.items() if key not in parts
    }


@pytest.mark.parametrize(("name", "manifold_config"), REFUSED)
def test_a_manifold_that_makes_no_sense_is_refused(name: str, manifold_config: ManifoldConfig):
    with pytest.raises(ValueError, match=r": expected .*; got|: expected .*, got"):
        build(name, manifold_config)


def bad_batches(manifold: Manifold) -> dict[str, tuple[Tensor, Tensor, str]]:
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


@EVERY_LOSS
def test_bad_batches_are_refused(name: str):
    loss = build(name)
    for case, (points, labels, message) in bad_batches(loss.manifold).items():
        with pytest.raises(ValueError, match=message):
            loss(points, labels)
            pytest.fail(case)


@EVERY_LOSS
def test_labels_out_of_range_are_refused(name: str):
    loss = build(name)
    features, labels = draw()
    if loss.num_classes is None:
        pytest.skip("owns nothing per class")
    with pytest.raises(ValueError, match=rf"expected labels from 0 to {CLASSES - 1}, got {CLASSES}"):
        loss(loss.manifold.from_features(features), labels + CLASSES - int(labels.max()))


@EVERY_LOSS
def test_no_classes_are_refused(name: str):
    if build(name).num_classes is None:
        pytest.skip("owns nothing per class")
    with pytest.raises(ValueError, match="num_classes must be at least 1, got 0"):
        build(name, classes=0)


@EVERY_LOSS
def test_a_public_name_and_a_line_of_help(name: str):
    assert getattr(dmlkit.losses, type(build(name)).__name__) is type(build(name))
    assert (LossConfig.variants[name].__doc__ or "").split("\n")[0].strip()


@EVERY_PAIR
def test_a_step_never_waits_for_the_device(name: str, manifold_config: ManifoldConfig, monkeypatch: pytest.MonkeyPatch):
    """Tensors of the meta device have no values, so whatever would ask a GPU for one fails here."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # it does not know this device
    loss = build(name, manifold_config).to("meta")
    features, labels = (part.detach().to("meta") for part in draw())
    features.requires_grad_()
    for epoch in range(3):  # memories open and filters start with epochs
        loss.set_epoch(epoch)
        loss(loss.manifold.from_features(features), labels).backward()
    assert features.grad is not None and features.grad.shape == features.shape
    with pytest.raises(RuntimeError, match="meta"):
        features.sum().item()
