"""Learning rates that fall from the head to the pixels."""

import pytest

from dmlkit.backbones import SmallCNN
from dmlkit.backbones.base import Backbone
from dmlkit.recipe.file import parse_recipe
from dmlkit.training.experiment import assemble
from tests.conftest import TINY_RECIPE, refuses

DECAYED = TINY_RECIPE.replace("lr: 0.003,", "lr: 0.003, layer_decay: 0.5,")
VIT = "{name: timm, model: test_vit, image_size: 32}"


@pytest.mark.parametrize("backbone", ["{name: small_cnn, width: 4}", "{name: resnet18}", VIT])
def test_each_block_learns_at_half_the_rate_of_the_next(backbone: str):
    text = DECAYED.replace("{name: small_cnn, width: 4}", backbone).replace("size: 16}", "size: 32}")
    experiment = assemble(parse_recipe(text, "r.yaml", ["optimizer.lr_multipliers.backbone=0.1"]))
    found = {id(p): group["lr"] for group in experiment.optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in experiment.optimizer.param_groups) == len(found)
    blocks = experiment.model.backbone.blocks()
    for name, parameter in experiment.model.backbone.named_parameters():
        depths = [len(blocks) - i for i, block in enumerate(blocks) if any(p is parameter for p in block.parameters())]
        depth = depths[0] if depths else len(blocks) + 1
        assert found[id(parameter)] == pytest.approx(0.003 * 0.1 * 0.5**depth), name
    assert found[id(experiment.objective.loss.proxies)] == pytest.approx(0.03)


def test_a_backbone_without_blocks_or_weights_that_train_is_one_line(monkeypatch: pytest.MonkeyPatch):
    frozen = parse_recipe(DECAYED, "r.yaml", ["backbone.tuning.name=none"])
    refuses("^r.yaml:8: optimizer.layer_decay: the backbone has no trainable weights", assemble, frozen)
    monkeypatch.setattr(SmallCNN, "blocks", Backbone.blocks)
    message = "^r.yaml:8: optimizer.layer_decay: small_cnn has no separate blocks"
    refuses(message, assemble, parse_recipe(DECAYED, "r.yaml"))
