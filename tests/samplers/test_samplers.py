"""Samplers that draw pairs and hard classes."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from dmlkit.distributed.stopping import TrainingStoppedError
from dmlkit.errors import UserError
from dmlkit.loading.batches import TrainingBatches
from dmlkit.losses.base import LossConfig
from dmlkit.losses.pair_loss import PairLossConfig
from dmlkit.manifolds import Poincare, Sphere
from dmlkit.recipe.file import parse_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.samplers import ClassBalanced, HardClasses, Paired
from dmlkit.samplers.base import ALL_PAIRS, SamplerConfig
from dmlkit.training.train import train
from tests.conftest import ONE_EPOCH, refuses
from tests.training.test_train import assert_equal_weights
from tests.training.test_tuning import Stopper

PAIR_LOSSES = sorted(
    [
        "lifted_structure",
        *(name for name, variant in LossConfig.variants.items() if issubclass(variant, PairLossConfig)),
    ]
)
RECIPE = "dataset: {{name: glyphs}}\nloss: {{name: {loss}}}\nsampler: {sampler}"
BALANCED = "{{name: class_balanced, classes_per_batch: {}, images_per_class: {}}}"


@pytest.mark.parametrize(
    ("loss", "sampler"),
    [
        *product(PAIR_LOSSES, [BALANCED.format(6, 1)]),
        *product(["triplet"], [BALANCED.format(1, 4), "{name: random, batch_size: 1}", BALANCED.format(1, 1)]),
    ],
)
def test_a_pair_loss_refuses_batches_without_its_pairs(loss: str, sampler: str):
    needs = "needs sampler.pairs of the same class and of different classes"
    with pytest.raises(UserError, match=f"recipe.yaml:2: loss: {loss} {needs}"):
        parse_recipe(RECIPE.format(loss=loss, sampler=sampler), "recipe.yaml")
    assert parse_recipe(RECIPE.format(loss="proxy_anchor", sampler=sampler), "recipe.yaml")
    assert parse_recipe(RECIPE.format(loss=loss, sampler=BALANCED.format(2, 2)), "recipe.yaml")


def options(name: str, **choices: tuple[int, ...]) -> list[SamplerConfig]:
    return [
        SamplerConfig.variants[name](**dict(zip(choices, each, strict=True))) for each in product(*choices.values())
    ]


SAMPLERS = [
    *options("random", batch_size=(1, 2, 24)),
    *options("weighted", batch_size=(1, 2, 24)),
    *options("class_balanced", classes_per_batch=(1, 2), images_per_class=(1, 2)),
    *options("hard_classes", classes_per_batch=(1, 2), images_per_class=(1, 2)),
    *options("hierarchical", super_classes_per_batch=(1, 2), classes_per_super_class=(1, 2), images_per_class=(1, 2)),
    *options("paired", classes_per_batch=(1, 2), images_per_class=(1, 2)),
]
WORDS = {(): "none", (True,): "of the same class only", (False,): "of different classes only"}


@pytest.mark.parametrize("config", SAMPLERS, ids=repr)
def test_the_words_say_which_pairs_batches_hold(config: SamplerConfig):
    labels = torch.arange(6).repeat_interleave(4)
    sampler = config.build(labels, 0, torch.arange(6) // 3)
    pairs = {
        labels[i].item() == labels[j].item()
        for epoch in range(8)
        for batch in sampler.batches(epoch)
        for k, i in enumerate(batch)
        for j in batch[:k]
    }
    assert config.pairs == sampler.pairs == WORDS.get(tuple(pairs), ALL_PAIRS)


def test_a_sampler_that_says_nothing_may_hold_any_pair(plugin: Callable[[str], None]):
    plugin(
        "from dmlkit.samplers.base import Sampler\n"
        "class Mine(Sampler, name='mine'):\n"
        "    def __len__(self): return 1\n"
        "    def batches(self, epoch): return [[0]]\n"
    )
    config = SamplerConfig.variants["mine"]()
    assert config.pairs == config.build(torch.zeros(1), 0).pairs == "of the same class and of different classes"


class Larger(ClassBalanced):
    """Batches of one image more than it declares."""

    def batches(self, epoch: int) -> list[list[int]]:
        return [[*batch, 0] for batch in super().batches(epoch)]


def test_batches_of_another_size_than_declared_are_refused():
    """Training left out the images beyond the declared size."""
    sampler = Larger(torch.arange(12) // 2, 0, classes_per_batch=2, images_per_class=2)
    with pytest.raises(UserError, match=r"Larger: gave 3 batches of \[5\] images, expected 3 of \[4\]; correct"):
        list(TrainingBatches(sampler, seed=0))


@pytest.mark.parametrize("wrong", [-1, 12])
def test_images_that_do_not_exist_are_refused(wrong: int, monkeypatch: pytest.MonkeyPatch):
    """The last image came for -1, and a traceback for 12."""
    sampler = ClassBalanced(torch.arange(12) // 2, 0, classes_per_batch=2, images_per_class=2)
    monkeypatch.setattr(ClassBalanced, "batches", lambda *_: [[0, 1, 2, 3], [0, 1, 2, 11], [wrong, 1, 2, 3]])
    with pytest.raises(UserError, match=f"ClassBalanced: gave the images {wrong}, expected 0 to 11; correct"):
        list(TrainingBatches(sampler, seed=0))


def test_one_class_is_not_trained_on(dmlkit, tiny_recipe, tmp_path):
    one = ("--set", "dataset.classes=6", "--set", "dataset.validation_fraction=0.6")
    dmlkit("train", tiny_recipe, "-o", tmp_path / "run", *one).refused(
        "dataset: got 1 training class, expected at least 2"
    )
    assert not (tmp_path / "run").exists()


def test_halves_hold_the_same_classes_in_the_same_order():
    labels = torch.arange(600) % 20
    sampler = Paired(labels, seed=1, classes_per_batch=5, images_per_class=4)
    for batch in sampler.batches(epoch=0):
        first, second = labels[batch].chunk(2)
        assert len(batch) == sampler.batch_size == 40
        assert torch.equal(first, second)
        assert torch.equal(first, first[::4].repeat_interleave(4))
        assert first.unique().numel() == 5
        assert len(set(batch)) == 40


@pytest.mark.parametrize("images", [2, 5, 13, 19])
def test_small_classes_repeat_images_but_none_stands_beside_itself(images: int):
    labels = torch.arange(6 * images) // images
    for batch in Paired(labels, seed=0, classes_per_batch=6, images_per_class=10).batches(epoch=0):
        first, second = batch[: len(batch) // 2], batch[len(batch) // 2 :]
        assert torch.equal(labels[first], labels[second]) and set(batch) == set(range(6 * images))
        assert all(one != other for one, other in zip(first, second, strict=True))
        for start in range(0, len(first), 10):
            assert len({*first[start : start + 10]} & {*second[start : start + 10]}) <= 1


def test_defaults_are_those_of_cgml():
    assert Paired.Config().build(torch.arange(520) // 40, seed=0).batch_size == 2 * 13 * 10


LABELS = torch.arange(12).repeat_interleave(5)


def hard(**options: Any) -> HardClasses:
    return HardClasses(LABELS, 3, **({"classes_per_batch": 5, "images_per_class": 2} | options))


def in_turn(drawn: list[int], similarity: Any, classes: list[int], count: int) -> list[int]:
    """The rule as a loop over all classes."""
    batch = list(drawn)
    while len(batch) < count:
        for one in drawn:
            others = [label for label in classes if label not in batch]
            batch.append(max(others, key=lambda label, one=one: float(similarity[one, label])))
            if len(batch) == count:
                break
    return batch


@pytest.mark.parametrize("manifold", [Sphere(6), Poincare(6)], ids=["sphere", "ball"])
@pytest.mark.parametrize("drawn", [1, 2])
def test_the_others_are_the_nearest_of_all_classes(manifold: Any, drawn: int):
    sampler = hard(drawn_classes=drawn)
    generator = torch.Generator().manual_seed(0)
    points = manifold.from_features(torch.randn(60, 6, generator=generator))
    for epoch in (0, 1):  # a class that the second epoch does not show keeps its mean of the first
        shown = torch.randperm(60, generator=generator)
        shown = shown if epoch == 0 else shown[LABELS[shown] != 7]
        values = points if epoch == 0 else manifold.from_features(manifold.to_features(points) * 0.5 + 0.2)
        for batch in shown.split(7):
            sampler.learn_from(values[batch], LABELS[batch], manifold)
        sampler.set_epoch(epoch + 1, manifold)
    means = torch.stack(
        [
            manifold.to_features((points if label == 7 else values)[label == LABELS]).double().mean(0)
            for label in range(12)
        ]
    )
    means = manifold.from_features(means)
    similarity = manifold.similarity(means, means)
    batches = sampler.batches(2)
    assert len(batches) == len(sampler) == 6 and sampler.batch_size == 10
    for batch in batches:
        classes = LABELS[batch][::2].tolist()
        assert classes == in_turn(classes[:drawn], similarity, list(range(12)), 5)
    seeds = Counter(label for batch in batches for label in LABELS[batch][: 2 * drawn : 2].tolist())
    assert max(seeds.values()) == 1 and len(seeds) == 6 * drawn  # the first round of the deck
    assert sampler.batches(2) == batches


def test_without_means_batches_are_class_balanced():
    balanced = ClassBalanced(LABELS, 3, classes_per_batch=5, images_per_class=2)
    assert hard().batches(0) == balanced.batches(0)
    sampler = hard(drawn_classes=5)
    sampler.learn_from(torch.randn(60, 6), LABELS, Sphere(6))
    sampler.set_epoch(1, Sphere(6))
    assert sampler.batches(1) == balanced.batches(1)


def test_classes_without_a_mean_are_dealt():
    sampler, space = hard(), Sphere(6)
    known = LABELS < 3
    sampler.learn_from(torch.randn(15, 6, generator=torch.Generator().manual_seed(0)), LABELS[known], space)
    sampler.set_epoch(1, space)
    for batch in sampler.batches(1):
        classes = LABELS[batch][::2].tolist()
        assert len(set(classes)) == 5
        if classes[0] < 3:  # the two others that have one are its neighbors
            assert set(classes[:3]) == {0, 1, 2}
    with pytest.raises(ValueError, match="has 12 classes, expected 2"):
        HardClasses(LABELS[:10], 0, classes_per_batch=2).restore(sampler.state())


def test_more_drawn_than_a_batch_has_are_refused():
    refuses(r"sampler\.drawn_classes: expected at most 5, the classes of a batch, got 6", hard, drawn_classes=6)


def test_a_run_that_stops_anywhere_ends_with_the_same_bits(tmp_path: Path):
    text = ONE_EPOCH.replace("epochs: 1", "epochs: 4").replace("images_per_class: 6", "images_per_class: 8")
    text = text.replace("{name: random, batch_size: 8}", "{name: hard_classes, classes_per_batch: 3}")
    recipe = parse_recipe(text, "recipe.yaml")
    train(recipe, tmp_path / "whole", device="cpu")
    whole = RunFolder(tmp_path / "whole").load_checkpoint("last")
    for run, epoch, last in (("between epochs", 1, True), ("in an epoch", 2, False)):
        with pytest.raises(TrainingStoppedError):
            train(recipe, tmp_path / run, device="cpu", progress=Stopper(epoch, last))
        train(recipe, tmp_path / run, device="cpu", resume=True)
        cut = RunFolder(tmp_path / run).load_checkpoint("last")
        for part in ("model", "sampler"):
            assert_equal_weights(cut[part], whole[part])
    balanced = parse_recipe(text.replace("hard_classes", "class_balanced"), "recipe.yaml")
    train(balanced, tmp_path / "balanced", device="cpu")
    other = RunFolder(tmp_path / "balanced").load_checkpoint("last")
    assert not torch.equal(other["model"]["head.linear.weight"], whole["model"]["head.linear.weight"])


def test_an_image_repeats_only_if_its_label_has_too_few():
    """Four labels are on the same four images, all of which a batch needs; a fifth label is on the others."""
    labels = torch.tensor([0] * 4 + [1] * 60)
    members = torch.tensor([[True] * 4 + [False], [False] * 4 + [True]])
    sampler = ClassBalanced(labels, 0, members=members, classes_per_batch=5, images_per_class=1)
    for batch in sampler.batches(0) + sampler.batches(1):
        assert sorted(batch)[:4] == [0, 1, 2, 3]


def test_groups_of_images_with_several_labels_cannot_be_kept_apart():
    refuses(
        r"sampler.apart: needs one label per image, got several; remove this key",
        ClassBalanced,
        torch.arange(4),
        0,
        groups=torch.arange(4),
        members=torch.ones(4, 2).bool(),
        apart="group",
        classes_per_batch=2,
        images_per_class=2,
    )
