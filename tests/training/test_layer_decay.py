"""Learning rates that fall from the head to the pixels."""

import pytest
import torch

from dmlkit.backbones import SmallCNN
from dmlkit.backbones.base import Backbone
from dmlkit.errors import UserError
from dmlkit.recipe.file import parse_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.experiment import assemble
from tests.conftest import TINY_RECIPE

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


def test_a_run_steps_by_these_rates(dmlkit, tmp_path):
    recipe = tmp_path / "decayed.yaml"
    recipe.write_text(DECAYED.replace("epochs: 3", "epochs: 1"))
    assert dmlkit("train", recipe, "-o", tmp_path / "run", "--device", "cpu").code == 0
    experiment = assemble(parse_recipe(DECAYED, "r.yaml"))
    start = experiment.model
    groups = [
        {"params": [p], "lr": 0.003 * 0.5 ** (len(start.backbone.blocks()) - i)}
        for i, block in enumerate(start.backbone.blocks())
        for p in block.parameters()
    ]
    loss = experiment.objective.loss
    optimizer = torch.optim.AdamW(
        [*groups, {"params": start.head.parameters()}, {"params": [loss.proxies], "lr": 0.03}],
        lr=0.003,
        weight_decay=1e-4,
    )
    for batch in experiment.sampler.batches(0):
        optimizer.zero_grad()
        images = torch.stack([experiment.train.sample(index) for index in batch])
        loss(start(images), experiment.train.labels[batch]).backward()
        optimizer.step()
    saved = RunFolder(tmp_path / "run").load_checkpoint("last")["model"]
    for name, tensor in start.state_dict().items():
        torch.testing.assert_close(saved[name], tensor, msg=name, rtol=1e-4, atol=1e-5)
    (row,) = RunFolder(tmp_path / "run").read_metrics()
    assert row.lr == 0.003


def test_a_backbone_without_blocks_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SmallCNN, "blocks", Backbone.blocks)
    with pytest.raises(UserError, match=r"^r.yaml:8: optimizer.layer_decay: small_cnn has no separate blocks"):
        assemble(parse_recipe(DECAYED, "r.yaml"))


def test_a_backbone_that_does_not_train_is_one_line():
    with pytest.raises(UserError, match=r"^r.yaml:8: optimizer.layer_decay: the backbone has no trainable weights"):
        assemble(parse_recipe(DECAYED, "r.yaml", ["backbone.tuning.name=none"]))
