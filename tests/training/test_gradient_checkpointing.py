"""Blocks computed again in the backward pass: the same bits from less memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone
from dmlkit.recipe.file import parse_recipe
from dmlkit.training.experiment import assemble
from dmlkit.training.gradient_checkpointing import recompute_blocks
from tests.conftest import TINY_RECIPE, refuses
from tests.contracts.conftest import shallow  # noqa: F401
from tests.contracts.test_backbones import config
from tests.training.test_train import assert_equal_weights, weights
from tests.training.test_tuning import DROPOUT, trained

DROPPING = {"drop_rate": 0.3, "proj_drop_rate": 0.2, "drop_path_rate": 0.3}
BACKBONES: dict[str, Callable[[], Any]] = {
    "convnext": lambda: config("convnext"),
    "ViT with dropout": lambda: config("timm", model="test_vit", arguments=DROPPING),
    "ViT with LoRA": lambda: config("timm", model="test_vit", tuning={"name": "lora", "rank": 2}),
    "EfficientNet": lambda: config("timm", model="test_efficientnet"),
}


def pixels(name: str) -> Tensor:
    """Images of the size that timm's small networks take; the larger network computes a sixth of that."""
    side = 64 if name == "convnext" else 160
    return torch.rand(3, 3, side, side)


def built(name: str, recomputed: bool) -> Backbone:
    torch.manual_seed(7)
    backbone = BACKBONES[name]().build().train()
    if recomputed:
        recompute_blocks(backbone)
    return backbone


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("name", BACKBONES)
def test_gradients_and_buffers_are_those_of_a_backbone_that_keeps_everything(name: str):
    gradients: list[dict[str, Tensor]] = []
    states: list[dict[str, Tensor]] = []
    for recomputed in (False, True):
        backbone = deepcopy(built(name, recomputed))  # as a batch of one image is tried
        images = pixels(name)
        for _ in range(2):
            backbone(images).square().sum().backward()
        found = {key: value.grad for key, value in backbone.named_parameters()}
        gradients.append({key: value for key, value in found.items() if value is not None})
        states.append(backbone.state_dict())
    assert any(gradient.abs().max() > 0 for gradient in gradients[0].values())
    assert_equal_weights(*gradients)
    assert_equal_weights(*states)


@contextmanager
def noted(module: nn.Module, note: Callable[[Tensor], None]) -> Iterator[None]:
    """What autograd keeps while the block runs, weights apart."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            note(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def size(tensors: list[Tensor]) -> int:
    """Bytes, those of a storage once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("name", BACKBONES)
def test_no_more_than_the_inputs_of_blocks_are_kept(name: str):
    images = pixels(name)
    plain = built(name, recomputed=False)
    kept: dict[bool, list[Tensor]] = {True: [], False: []}  # in a block, and elsewhere
    inputs: list[Tensor] = []
    within = [False]

    def enter(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs.append(given[0])
        within[0] = True

    def leave(*_: object) -> None:
        within[0] = False

    for block in plain.blocks():
        for part in block if isinstance(block, nn.ModuleList) else [block]:
            if list(part.children()):
                part.register_forward_pre_hook(enter)
                part.register_forward_hook(leave)
    with noted(plain, lambda tensor: kept[within[0]].append(tensor)):
        plain(images)
    recomputed, found = built(name, recomputed=True), list[Tensor]()
    with noted(recomputed, found.append):
        recomputed(images)
    assert size(found) <= size([*kept[False], *inputs])
    assert size(kept[True]) > 3 * size(inputs)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "overrides",
    [
        (DROPOUT, "transform.size=32", "training.accumulate=2", "training.ema=0.5"),
        (DROPOUT, "transform.size=32", "training.precision=bf16"),
        ("backbone={name: resnet18, freeze_epochs: 1}", "training.clip_grad_norm=0.5"),
        ("backbone={name: resnet18, tuning: {name: last_blocks, blocks: 2}}", "loss={name: multi_similarity}"),
    ],
    ids=["vit", "vit in bf16", "first epoch frozen", "last blocks"],
)
def test_a_run_ends_with_the_same_bits(overrides: tuple[str, ...], tmp_path: Path):
    overrides = (*overrides, "training.epochs=2")
    plain = weights(trained(tmp_path / "plain", *overrides))
    recomputed = trained(tmp_path / "recomputed", *overrides, "training.gradient_checkpointing=true")
    assert_equal_weights(weights(recomputed), plain)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), r"^r.yaml:9: training.gradient_checkpointing: this backbone has no blocks that can be recomputed"),
        (
            ("backbone={name: resnet18, tuning: {name: none}}",),
            r"backbone.tuning: none needs training.gradient_checkpointing False, got True, because no weight of the",
        ),
    ],
)
def test_a_backbone_with_nothing_to_compute_again_is_one_line(overrides: tuple[str, ...], message: str):
    text = TINY_RECIPE.replace("{epochs: 3", "{gradient_checkpointing: true, epochs: 3")
    refuses(message, lambda: assemble(parse_recipe(text, "r.yaml", overrides)))
