"""Every tuning of a backbone: what it freezes has no gradient, no optimizer state, no graph, and stays to the bit."""

from typing import Any

import pytest
from torch import nn

from dmlkit.backbones.base import BackboneConfig
from dmlkit.backbones.tuning import TuningConfig
from dmlkit.errors import UserError
from dmlkit.recipe.file import parse_recipe
from dmlkit.testing import check_tuning
from dmlkit.training.experiment import Experiment, assemble
from tests.conftest import TINY_RECIPE
from tests.contracts.test_backbones import config

pytestmark = pytest.mark.usefixtures("shallow")
TUNED: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "last_blocks": {"name": "last_blocks", "blocks": 2},
    "lora": {"name": "lora", "targets": "all", "rank": 2},
}
"""The tunings that freeze something."""
BACKBONES = sorted(set(BackboneConfig.variants) - {"resnet50", "resnet101", "identity"})


def trained_names(backbone: nn.Module) -> list[str]:
    return [name for name, parameter in backbone.named_parameters() if parameter.requires_grad]


# Blocks are each backbone's own; what is frozen or updated depends on the kinds of layers alone.
OTHERS = {"none": {"convnext", "googlenet", "resnet18"}, "lora": {"bn_inception", "googlenet"}}
CASES = [(name, tuning) for tuning in sorted(TUNED) for name in BACKBONES if name not in OTHERS.get(tuning, ())]


@pytest.mark.parametrize(("name", "tuning"), CASES)
def test_only_what_is_tuned_has_gradients_and_moves(name: str, tuning: str):
    check_tuning(TuningConfig.variants[tuning].model_validate(TUNED[tuning]), config(name))


def experiment(*overrides: str) -> Experiment:
    return assemble(parse_recipe(TINY_RECIPE, "tiny.yaml", overrides))


@pytest.mark.parametrize("tuning", sorted(TUNED))
def test_the_optimizer_holds_what_trains_alone(tuning: str):
    found = experiment(f"backbone.tuning={TUNED[tuning]}")
    held = [parameter for group in found.optimizer.param_groups for parameter in group["params"]]
    modules = nn.ModuleList([found.model, found.objective])
    assert {id(parameter) for parameter in held} == {id(p) for p in modules.parameters() if p.requires_grad}


def test_full_tuning_trains_everything():
    found = experiment()
    assert trained_names(found.model) == [name for name, _ in found.model.named_parameters()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["backbone.freeze_epochs=1"], "backbone.tuning: none needs backbone.freeze_epochs 0, got 1"),
        (
            ["optimizer.lr_multipliers.backbone=0.1"],
            "backbone.tuning: none needs optimizer.lr_multipliers.backbone 1.0",
        ),
        (
            ["backbone={name: resnet18, pooling: {name: gem, learn: true}, tuning: {name: none}}"],
            "backbone.pooling: gem needs backbone.tuning.name full or last_blocks or lora, got none",
        ),
    ],
)
def test_what_a_frozen_backbone_would_ignore_is_refused(changes: list[str], message: str):
    with pytest.raises(UserError) as refusal:
        parse_recipe(TINY_RECIPE, "tiny.yaml", ["backbone.tuning={name: none}", *changes])
    assert message in str(refusal.value) and "because" in str(refusal.value)
