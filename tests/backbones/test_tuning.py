"""Tuning of the last blocks and updates of low rank: which weights train, and W + alpha / r B A on those asked for."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from dmlkit.backbones.base import Backbone
from dmlkit.backbones.tuning import LoRAConfig, LowRankUpdate
from dmlkit.errors import UserError
from dmlkit.pooling import PoolingConfig
from tests.conftest import refuses
from tests.contracts.conftest import shallow  # noqa: F401
from tests.contracts.test_backbones import WITH_POOLING, config

VIT_S, VIT_TINY = ({"model": f"vit_{size}_patch16_224"} for size in ("small", "tiny"))
ADAPTED: dict[str, tuple[str, dict[str, Any], LoRAConfig, int]] = {
    "timm ViT, all": ("timm", VIT_TINY, LoRAConfig(targets="all"), 1 + 12 * 4),  # patches, qkv, projection, MLP
    "ViT, all": ("vit", {}, LoRAConfig(targets="all"), 1 + 3 * 4),
    "ResNet-18": ("resnet18", {}, LoRAConfig(targets="all"), 20),
    "ConvNeXt-T": ("convnext", {}, LoRAConfig(targets="all"), 1 + 3 + 4 * 3),  # stem, halvings, three a block
    "Swin-T": ("timm", {"model": "swin_tiny_patch4_window7_224"}, LoRAConfig(), 12 * 2),
}
"""Backbone, its options, the tuning, and how many weights it adapts; torchvision's have few blocks."""


def adapted(case: str) -> Backbone:
    """With updates that are not zero."""
    name, options, tuning, _ = ADAPTED[case]
    torch.manual_seed(0)
    backbone = config(name, tuning=tuning, **options).build().eval()
    for update in updates(backbone):
        nn.init.normal_(update.up, std=0.02)
    return backbone


def updates(backbone: nn.Module) -> list[LowRankUpdate]:
    return [module for module in backbone.modules() if isinstance(module, LowRankUpdate)]


@pytest.mark.parametrize("case", ADAPTED)
@pytest.mark.usefixtures("shallow")
@torch.no_grad()
def test_merged_weights_give_the_same_features(case: str):
    backbone = adapted(case)
    assert len(updates(backbone)) == ADAPTED[case][3]
    side = 224 if "timm" in ADAPTED[case][0] else 64
    images = torch.randn(1, 3, side, side)
    before = backbone(images)
    name, options, _, _ = ADAPTED[case]
    torch.manual_seed(0)
    plain = config(name, **options).build().eval()
    assert (before - plain(images)).abs().max() > 1e-3
    merged = backbone.merge()(images)
    torch.testing.assert_close(merged, before, atol=1e-5, rtol=0)
    assert backbone.state_dict().keys() == plain.state_dict().keys() and not updates(backbone)
    plain.load_state_dict(backbone.state_dict())
    assert torch.equal(plain(images), merged)


@pytest.mark.parametrize(
    "layer", [nn.Linear(12, 20), nn.Conv2d(12, 20, 3, padding=1), nn.Conv2d(12, 24, 1, groups=2)], ids=str
)
def test_an_adapted_layer_adds_b_a_x(layer: nn.Linear | nn.Conv2d):
    """The equation as it is written, with the update as a layer of its own beside the frozen one."""
    rank, alpha = 3, 6.0
    frozen, update = copy.deepcopy(layer), LowRankUpdate(layer.weight, rank=rank, alpha=alpha)
    nn.init.normal_(update.up)
    parametrize.register_parametrization(layer, "weight", update)
    x = torch.randn(4, 12) if isinstance(layer, nn.Linear) else torch.randn(4, 12, 5, 5)
    beside = copy.deepcopy(frozen)
    beside.register_parameter("bias", None)
    beside.weight.data = torch.einsum("mr,rn->mn", update.up, update.down).reshape(beside.weight.shape)
    torch.testing.assert_close(layer(x), frozen(x) + alpha / rank * beside(x))


def test_a_fresh_update_changes_nothing_and_is_the_same_for_a_seed():
    images = torch.randn(1, 3, 64, 64)
    found: list[dict[str, torch.Tensor]] = []
    for tuning in (LoRAConfig(targets="all"), LoRAConfig(targets="all"), None):
        torch.manual_seed(0)
        backbone = config("resnet18", **({"tuning": tuning} if tuning else {})).build().eval()
        with torch.no_grad():
            found.append({**backbone.state_dict(), "features": backbone(images)})
    assert torch.equal(found[0]["features"], found[2]["features"])
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_an_optimizer_keeps_at_most_2_percent_of_full_tuning():
    def kept(tuning: dict[str, Any]) -> int:
        """Bytes of Adam's state for ViT-S and a head of 128."""
        backbone = config("timm", tuning=tuning, **VIT_S).build()
        parameters = [*backbone.tuned_parameters(), *nn.Linear(backbone.num_features, 128).parameters()]
        optimizer = torch.optim.AdamW(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())

    assert kept({"name": "lora", "rank": 8}) <= 0.02 * kept({"name": "full"})


def test_a_few_steps_lower_the_loss_and_move_updates_alone():
    torch.manual_seed(0)
    backbone = config("timm", model="test_vit", tuning=LoRAConfig(rank=4)).build().train()
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    images, target = torch.randn(8, 3, 160, 160), torch.randn(8, backbone.num_features)
    optimizer = torch.optim.AdamW(backbone.tuned_parameters(), lr=3e-3)
    losses: list[float] = []
    for _ in range(6):
        loss = (backbone(images) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    moved = {name for name, tensor in backbone.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if name.endswith((".down", ".up"))} != set()


@pytest.mark.parametrize(
    ("name", "tuning", "reason"),
    [
        ("resnet18", LoRAConfig(), "backbone.tuning.targets: got attention, but this backbone has no"),
        ("convnext", LoRAConfig(), "backbone.tuning.targets: got attention, but this backbone has no"),
        ("vit", LoRAConfig(rank=700), "backbone.tuning.rank: got 700, but no update of this rank has fewer values"),
    ],
)
def test_what_cannot_be_adapted_is_refused_with_the_reason(name: str, tuning: LoRAConfig, reason: str):
    with pytest.raises(UserError, match=reason), torch.device("meta"):
        config(name, tuning=tuning).build()


LAST: list[tuple[str, dict[str, Any], int, tuple[str, ...]]] = [
    ("small_cnn", {}, 6, ("layers.17.", "layers.18.")),
    ("resnet18", {}, 8, ("network.layer4.1.",)),
    ("vit", {}, 12, ("network.encoder.layers.encoder_layer_11.", "network.encoder.ln.")),
    ("convnext", {}, 18, ("network.features.7.2.", "network.classifier.0.")),
    ("googlenet", {}, 9, ("network.inception5b.",)),
    ("bn_inception", {}, 10, ("layers.inception_5b_",)),
    ("timm", {"model": "resnet18"}, 8, ("network.layer4.1.",)),
    ("timm", {"model": "vit_tiny_patch16_224"}, 12, ("network.blocks.11.", "network.norm.")),
    ("timm", {"model": "convnext_atto"}, 4, ("network.stages.3.", "network.head.norm.")),
    ("timm", {"model": "swin_tiny_patch4_window7_224"}, 4, ("network.layers.3.", "network.norm.")),
    ("timm", {"model": "efficientnet_b0"}, 7, ("network.blocks.6.", "network.conv_head.", "network.bn2.")),
    ("timm", {"model": "regnetx_002"}, 13, ("network.s4.b7.",)),
]
"""A network, how many blocks it has, and where the parameters of the last are."""


@pytest.fixture
def without_memory() -> Iterator[None]:
    """Names and what trains are all that counts here: to draw the weights took 0.4 s for each network."""
    with torch.device("meta"):
        yield


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize(("name", "options", "count", "last"), LAST)
def test_the_last_block_trains_with_what_follows_it(name, options, count, last):
    backbone = config(name, tuning={"name": "last_blocks"}, **options).build()
    trained = {key for key, parameter in backbone.named_parameters() if parameter.requires_grad}
    assert trained == {key for key, _ in backbone.named_parameters() if key.startswith(last)}
    assert all(any(key.startswith(start) for key in trained) for start in last)
    with pytest.raises(UserError, match=f"backbone.tuning.blocks: got {count + 1}, expected at most {count}, the"):
        config(name, tuning={"name": "last_blocks", "blocks": count + 1}, **options).build()


@pytest.mark.usefixtures("without_memory")
def test_a_learned_pooling_trains_with_the_last_block():
    backbone = config("vit", tuning={"name": "last_blocks"}, pooling={"name": "gem", "learn": True}).build()
    assert "pooling.p" in {key for key, parameter in backbone.named_parameters() if parameter.requires_grad}


@pytest.mark.usefixtures("without_memory")
def test_a_network_without_known_blocks_is_refused():
    refuses("cannot determine the blocks of VGG", config("timm", model="vgg11", tuning={"name": "last_blocks"}).build)


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("name", WITH_POOLING)
def test_a_pooling_that_trains_counts_to_the_last_block(name: str):
    backbone = config(name, pooling=PoolingConfig.variants["gem"](learn=True)).build()
    *_, exponent = backbone.parameters()
    groups = backbone.tuned_blocks()
    assert exponent.numel() == 1 and any(parameter is exponent for parameter in groups[0])
    assert sum(map(len, groups)) == len(list(backbone.parameters()))
