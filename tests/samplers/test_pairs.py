"""W4: batches that hold no pair are refused where a loss learns from pairs, which trained nothing and gave figures."""

from itertools import product

import pytest
import torch

from dmlkit.errors import UserError
from dmlkit.losses.base import LossConfig
from dmlkit.losses.pair_loss import PairLossConfig
from dmlkit.recipe.file import parse_recipe
from dmlkit.samplers.base import SamplerConfig, pairs_among

PAIR_LOSSES = sorted(
    [
        "lifted_structure",
        *(name for name, variant in LossConfig.variants.items() if issubclass(variant, PairLossConfig)),
    ]
)
RECIPE = "dataset: {{name: glyphs}}\nloss: {{name: {loss}}}\nsampler: {sampler}"
BALANCED = "{{name: class_balanced, classes_per_batch: {}, images_per_class: {}}}"


@pytest.mark.parametrize("loss", PAIR_LOSSES)
@pytest.mark.parametrize(
    "sampler", [BALANCED.format(6, 1), BALANCED.format(1, 4), "{name: random, batch_size: 1}", BALANCED.format(1, 1)]
)
def test_a_pair_loss_refuses_batches_without_its_pairs(loss: str, sampler: str):
    needs = "needs sampler.pairs of the same class and of different classes"
    with pytest.raises(UserError, match=f"recipe.yaml:2: loss: {loss} {needs}"):
        parse_recipe(RECIPE.format(loss=loss, sampler=sampler), "recipe.yaml")
    assert parse_recipe(RECIPE.format(loss="proxy_anchor", sampler=sampler), "recipe.yaml")
    assert parse_recipe(RECIPE.format(loss=loss, sampler=BALANCED.format(2, 2)), "recipe.yaml")


@pytest.mark.parametrize(("classes", "images"), product((1, 2), (1, 2)))
def test_the_words_say_which_pairs_batches_hold(classes: int, images: int):
    labels = torch.arange(6).repeat_interleave(4)
    config = SamplerConfig.variants["class_balanced"](classes_per_batch=classes, images_per_class=images)
    for batch in config.build(labels, seed=0).batches(0):
        pairs = {labels[i].item() == labels[j].item() for k, i in enumerate(batch) for j in batch[:k]}
        expected = {(): "none", (True,): "of the same class only", (False,): "of different classes only"}
        both = "of the same class and of different classes"
        assert config.pairs == pairs_among(classes, images) == expected.get(tuple(pairs), both)


def test_one_class_is_not_trained_on(dmlkit, tiny_recipe, tmp_path):
    one = ("--set", "dataset.classes=6", "--set", "dataset.validation_fraction=0.6")
    result = dmlkit("train", tiny_recipe, "-o", tmp_path / "run", *one)
    assert result.code == 2 and "dataset: got 1 training class, expected at least 2" in result.err
    assert not (tmp_path / "run").exists()
