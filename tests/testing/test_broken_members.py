"""A member that breaks its contract, one of each family: the check names what is broken.

The classes are ``abstract``, so that no recipe and no other test meets them.
"""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from dmlkit import testing
from dmlkit.backbones.base import Backbone
from dmlkit.backbones.small_cnn import SmallCNN
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.glyphs import Glyphs, GlyphsConfig
from dmlkit.heads import Linear
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.manifolds.base import Manifold, Side
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.metrics.retrieval import RecallConfig
from dmlkit.miners import All, Triplets
from dmlkit.optimizers import AdamConfig
from dmlkit.pooling import Pooling, PoolingConfig
from dmlkit.regularizers import Regularizer, RegularizerConfig
from dmlkit.samplers.random import Random
from dmlkit.schedules import ScheduleConfig
from dmlkit.transforms.presets import PlainConfig
from dmlkit.transport.base import TransportConfig, TransportSolver


class BrokenLossConfig(LossConfig, frozen=True, abstract=True):
    """A loss of pairs that breaks one promise."""

    name: Literal["broken"] = "broken"
    how: Literal["not", "order", "waits", "forgets", "division", "half", "rank"] = "not"
    scale: float = 1.0

    def build(self, manifold: Manifold, num_classes: int) -> "BrokenLoss":
        return BrokenLoss(manifold, how=self.how, scale=self.scale)


class BrokenLoss(Loss):
    def __init__(self, manifold: Manifold, *, how: str, scale: float) -> None:
        super().__init__(manifold)
        self.how, self.scale, self.steps = how, scale, 0

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if self.how == "half":
            return self.compute(embeddings, labels)
        return super().forward(embeddings, labels)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        distance = self.manifold.distance(embeddings, embeddings)
        same = labels[:, None] == labels
        value = (torch.where(same, distance, (1 - distance).relu()) / (self.scale + 1)).mean()
        self.steps += 1
        match self.how:
            case "order":
                return value + distance[0].sum()
            case "waits":
                return value * value.item()
            case "forgets":
                return value * (1 + self.steps)
            case "division":
                return value / (~same).sum()
            case "rank":
                return value[None]
            case _:
                return value


@pytest.mark.parametrize(
    ("how", "broken"),
    [
        ("order", "order_of_the_batch_does_not_matter: check that the order of the images in a batch"),
        ("waits", "a_step_never_waits_for_the_device: check that no step reads a value from a GPU"),
        ("forgets", "a_checkpoint_in_mid_training_changes_nothing: check that a loss restored from its state_dict"),
        ("division", "degenerate_batches_stay_finite: .*one class: the value is"),
        ("half", "half_precision_is_computed_in_full: .*got a value in torch"),
        ("rank", r"value_is_a_finite_scalar: .*got a value of shape \(1,\)"),
    ],
)
def test_a_broken_loss(how: Any, broken: str):
    with pytest.raises(AssertionError, match=f"^broken( on [a-z_-]+)?: {broken}"):
        testing.check_loss(BrokenLossConfig(how=how))


def test_the_loss_without_a_fault_keeps_its_contract():
    testing.check_loss(BrokenLossConfig())


class Mixing(PoolingConfig, frozen=True, abstract=True):
    """Of all images of the batch."""

    name: Literal["mixing"] = "mixing"

    def build(self) -> Pooling:
        class Mixed(Pooling):
            def forward(self, maps: Tensor, token: Tensor | None = None) -> Tensor:
                return maps.mean((2, 3)) - maps.mean((0, 2, 3))

        return Mixed()


class Dividing(RegularizerConfig, frozen=True, abstract=True):
    """Divides by the spread of the batch."""

    name: Literal["dividing"] = "dividing"

    def build(self, manifold: Manifold) -> Regularizer:
        class Divided(Regularizer):
            def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
                return 1 / (embeddings - embeddings.mean(0)).square().sum()

        return Divided(manifold)


class Overlapping(GlyphsConfig, frozen=True, abstract=True):
    """Tests on what it trains on."""

    def load(self, split: Any) -> Glyphs:
        return super().load("all")


class Gapped(GlyphsConfig, frozen=True, abstract=True):
    """Has a class without images."""

    def build(self, split: Any) -> Dataset:
        dataset = super().build(split)
        dataset.class_names = (*dataset.class_names, "nothing")
        return dataset


class Changed(GlyphsConfig, frozen=True, abstract=True):
    """Has an attribute of another type."""

    attribute: Literal["class_names", "paths", "groups"]

    def build(self, split: Any) -> Dataset:
        dataset, numbers = super().build(split), range(999)
        others: dict[str, Any] = {
            "class_names": tuple(numbers[: len(dataset.class_names)]),
            "paths": numbers[: len(dataset)],
            "groups": torch.zeros(len(dataset)),
        }
        setattr(dataset, self.attribute, others[self.attribute])
        return dataset


class Unseeded(Random.Config, frozen=True, abstract=True):
    """Draws from the global generator."""

    def build(self, labels: Tensor, seed: int, *others: Any) -> Random:
        sampler = super().build(labels, seed)
        rows, count = len(labels), sampler.batch_size
        sampler.batches = lambda epoch: [torch.randperm(rows)[:count].tolist() for _ in range(len(sampler))]
        return sampler


class Forgetful(Random.Config, frozen=True, abstract=True):
    """Leaves out images by what it has seen, which is no part of its state."""

    def build(self, labels: Tensor, seed: int, *others: Any) -> Random:
        class Forgets(Random):
            seen = 0

            def learn_from(self, embeddings: Tensor, labels: Tensor, manifold: Manifold) -> None:
                self.seen += len(labels)

            def batches(self, epoch: int) -> list[list[int]]:
                return [[(index + self.seen) % len(self.labels) for index in batch] for batch in super().batches(epoch)]

        return Forgets(labels, seed, batch_size=self.batch_size)


class Reseeding(Random.Config, frozen=True, abstract=True):
    """Seeds the global generator."""

    def build(self, labels: Tensor, seed: int, *others: Any) -> Random:
        class Reseeds(Random):
            def batches(self, epoch: int) -> list[list[int]]:
                torch.manual_seed(epoch)
                return super().batches(epoch)

        return Reseeds(labels, seed, batch_size=self.batch_size)


class WithoutGroups(Random.Config, frozen=True, abstract=True):
    """Does not take what training passes."""

    def build(self, labels: Tensor, seed: int, super_classes: Tensor | None = None) -> Random:
        return super().build(labels, seed, super_classes)


class WithoutFused(AdamConfig, frozen=True, abstract=True):
    """Does not take what training passes."""

    def build(self, parameters: dict[str, list[nn.Parameter]]) -> torch.optim.Optimizer:
        return super().build(parameters)


class Doubling(ScheduleConfig, frozen=True, abstract=True):
    """Twice the rate."""

    name: Literal["doubling"] = "doubling"

    def after_warmup(self, epoch: float, epochs: int) -> float:
        return 2.0


class Oblong(PlainConfig, frozen=True, abstract=True):
    """No squares."""

    def training(self) -> Any:
        return lambda image: image


class Total(RecallConfig, frozen=True, abstract=True):
    """Counts queries."""

    def per_query(self, *arguments: Any) -> Any:
        return {name: value * 2 for name, value in super().per_query(*arguments).items()}


class KeepsNegatives(All.Config, frozen=True, abstract=True):
    """Keeps what is not positive."""

    def build(self, manifold: Manifold) -> All:
        class Wrong(All):
            def __call__(self, distance: Tensor, positive: Tensor, negative: Tensor) -> Triplets:
                return Triplets(~positive, None)

        return Wrong()


class OneRate(AdamConfig, frozen=True, abstract=True):
    """The same rate for all."""

    def groups(self, parameters: dict[str, list[nn.Parameter]]) -> list[dict[str, Any]]:
        return [{**group, "lr": self.lr} for group in super().groups(parameters)]


class HalfHead(Linear.Config, frozen=True, abstract=True):
    """Leaves its points in half precision."""

    def build(self, num_features: int, manifold: Manifold) -> Linear:
        head = super().build(num_features, manifold)
        head.to_points = lambda projected: manifold.from_features(projected).bfloat16()
        return head


class OneWay(Euclidean.Config, frozen=True, abstract=True):
    """A distance that is longer on the way back."""

    def build(self, dim: int) -> Euclidean:
        class OneWayStreets(Euclidean):
            def distance(self, x: Tensor, y: Tensor) -> Tensor:
                return super().distance(x, y) * (1 + (x[:, :1] - y[:, 0]).sigmoid())

        return OneWayStreets(dim, similarity=self.similarity, proxies=self.proxies)


class Doubled(Euclidean.Config, frozen=True, abstract=True):
    """Index vectors other than those of its form."""

    def build(self, dim: int) -> Euclidean:
        class DoubledLifts(Euclidean):
            def distance_vectors(self, points: Tensor, side: Side) -> Tensor:
                return 2 * super().distance_vectors(points, side)

        return DoubledLifts(dim, similarity=self.similarity, proxies=self.proxies)


class Uniform(TransportConfig, frozen=True, abstract=True):
    """The same mass everywhere."""

    name: Literal["uniform"] = "uniform"

    def build(self) -> TransportSolver:
        class Uniformly(TransportSolver):
            def solve(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
                return torch.full_like(cost, 1.0) * rows.mean()

        return Uniformly()


class Mirroring(PlainConfig, frozen=True, abstract=True):
    """Mirrors half of the images, which is all that it draws."""

    @property
    def augments(self) -> bool:
        return True

    def training(self) -> Any:
        return Mirror(self)


class Mirror:
    def __init__(self, config: PlainConfig) -> None:
        self.resized = config.evaluation()

    def __call__(self, image: Tensor) -> Tensor:
        return self.resized(image).flip(2) if torch.rand(()) < 0.5 else self.resized(image)


def test_a_transform_of_two_results_keeps_its_contract():
    testing.check_transform(Mirroring(size=32))


class BatchMean(SmallCNN.Config, frozen=True, abstract=True):
    """Subtracts the mean of the batch."""

    def create(self) -> Backbone:
        class Centred(SmallCNN):
            def forward(self, images: Tensor) -> Tensor:
                features = super().forward(images)
                return features - features.mean(0)

        return Centred(width=self.width)


GLYPHS: dict[str, Any] = {"classes": 20, "images_per_class": 2, "size": 16}


@pytest.mark.parametrize(
    ("check", "config", "broken"),
    [
        (testing.check_pooling, Mixing(), "a_vector_is_of_one_image"),
        (testing.check_regularizer, Dividing(), "degenerate_batches_stay_finite"),
        (testing.check_dataset, Overlapping(**GLYPHS), "splits_share_no_class"),
        (testing.check_dataset, Gapped(**GLYPHS), "labels_names_and_paths_fit_together"),
        (testing.check_dataset, Changed(**GLYPHS, attribute="class_names"), ".*: train: the class name 0 is no string"),
        (testing.check_dataset, Changed(**GLYPHS, attribute="paths"), ".*: train: the path 0 is no string"),
        (testing.check_dataset, Changed(**GLYPHS, attribute="groups"), ".*: train: groups is not int64"),
        (testing.check_sampler, Unseeded(), "batches_depend_on_seed_and_epoch_alone: .*: it changes"),
        (testing.check_sampler, Reseeding(), "batches_depend_on_seed_and_epoch_alone: .*: it changes"),
        (testing.check_sampler, Forgetful(), "a_checkpoint_changes_no_batch: .*: epoch 2 has other batches"),
        (testing.check_sampler, WithoutGroups(), "batches_depend_on_seed_and_epoch_alone: .*: TypeError"),
        (testing.check_optimizer, WithoutFused(), "groups_carry_their_rates: .*: TypeError: .* 'fused'"),
        (testing.check_schedule, Doubling(), "factors_are_shares"),
        (testing.check_transform, Oblong(size=32), "images_become_squares"),
        (testing.check_metric, Total(), "perfect_embeddings_score_one"),
        (testing.check_miner, KeepsNegatives(), "it_keeps_positives_and_chooses_negatives"),
        (testing.check_optimizer, OneRate(), "groups_carry_their_rates"),
        (testing.check_head, HalfHead(), "outputs_are_points"),
        (testing.check_manifold, OneWay(), "distance_is_a_metric"),
        (testing.check_manifold, Doubled(), "the_index_form_is_that_of_the_index_vectors"),
        (testing.check_transport, Uniform(), "marginals_hold"),
        (testing.check_backbone, BatchMean(width=4), "features_are_of_one_image_each"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_member(check: Callable[[Any], None], config: Any, broken: str):
    with pytest.raises(AssertionError, match=rf"^{config.name}.*: {broken}"):
        check(config)
