"""W4: batches that hold no pair are refused where a loss learns from pairs, which trained nothing and gave figures."""

from collections.abc import Callable
from itertools import product

import pytest
import torch

from dmlkit.errors import UserError
from dmlkit.losses.base import LossConfig
from dmlkit.losses.pair_loss import PairLossConfig
from dmlkit.recipe.file import parse_recipe
from dmlkit.samplers.base import ALL_PAIRS, SamplerConfig

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


def test_one_class_is_not_trained_on(dmlkit, tiny_recipe, tmp_path):
    one = ("--set", "dataset.classes=6", "--set", "dataset.validation_fraction=0.6")
    result = dmlkit("train", tiny_recipe, "-o", tmp_path / "run", *one)
    assert result.code == 2 and "dataset: got 1 training class, expected at least 2" in result.err
    assert not (tmp_path / "run").exists()
