"""Adapters of low-rank updates: peft loads them onto the plain network, which then computes the features of the run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models import VisionTransformer

import dmlkit as package
from dmlkit.backbones.base import Backbone
from dmlkit.backbones.small_cnn import SmallCNN
from dmlkit.backbones.timm import Timm
from dmlkit.backbones.torchvision import ViT
from dmlkit.backbones.tuning import LoRAConfig, LowRankUpdate
from dmlkit.export.hub import write_adapter
from tests.conftest import ONE_EPOCH


@pytest.fixture
def peft() -> Any:
    """Imported by the tests that need it: with transformers, 1.3 s for each process that collects tests."""
    return pytest.importorskip("peft", reason="it comes with the extra dmlkit[dev]")


class Given(Backbone):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)


def vision_transformer() -> nn.Module:
    return VisionTransformer(image_size=8, patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32)


@pytest.mark.parametrize(
    ("build", "config", "targets"),
    [
        (vision_transformer, ViT.Config, "attention"),  # torch's attention, which reads its weights directly
        (vision_transformer, ViT.Config, "all"),
        (lambda: timm.create_model("test_vit", num_classes=0), Timm.Config, "attention"),
        (lambda: timm.create_model("test_efficientnet", num_classes=0), Timm.Config, "all"),  # groups, same padding
    ],
)
def test_peft_computes_the_features(build: Callable[[], nn.Module], config: Any, targets, tmp_path, peft):
    torch.manual_seed(0)
    plain = build().eval()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.1)
    adapted = Given(build())
    adapted.network.load_state_dict(plain.state_dict())
    keys: Any = {"model": "test"} if config is Timm.Config else {}
    tuning = LoRAConfig(rank=3, alpha=5.0, targets=targets)
    adapted.tune(tuning).eval()
    for module in adapted.modules():
        if isinstance(module, LowRankUpdate):
            nn.init.normal_(module.up, std=0.1)
    assert write_adapter(config(weights="file.pt", tuning=tuning, **keys), adapted, tmp_path) == ""
    side = 8 if config is ViT.Config else 160
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        before, expected = plain(images), adapted(images)
        found = peft.PeftModel.from_pretrained(plain, str(tmp_path)).eval()(images)
    assert (expected - before).abs().max() > 0.01 * before.abs().max()
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.slow
def test_a_folder_for_the_hub_has_it(trained_once: Callable[..., Path], tmp_path: Path, dmlkit, peft: Any):
    torch.manual_seed(0)
    network = timm.create_model("test_vit", num_classes=0, img_size=32)
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    keys = f"model: test_vit, image_size: 32, weights: {tmp_path}/weights.safetensors"
    backbone = f"{{name: timm, {keys}, tuning: {{name: lora, rank: 2}}}}"
    text = ONE_EPOCH.replace("{name: small_cnn, width: 4}", backbone).replace("plain, size: 16", "plain, size: 32")
    run = trained_once(tmp_path / "home", text)
    folder = tmp_path / "m"
    for _ in range(2):  # again, over its own
        assert dmlkit("export", run, "--format", "hub", "-o", folder).code == 0
    assert sorted(one.name for one in tmp_path.iterdir() if one.name.startswith((".m", "m"))) == ["m"]
    for path in folder.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()
    assert "Adapter\n\n" in (folder / "README.md").read_text()
    model = package.load(folder, device="cpu").trained.model
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        normalized = model.normalization(images)
        expected = model.backbone(normalized)
        found = peft.PeftModel.from_pretrained(network.eval(), str(folder)).eval()(normalized)
        assert (found - expected).abs().max() <= 1e-5
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "timm/test_vit"


def test_what_peft_cannot_adapt_is_named(tmp_path: Path):
    own = SmallCNN.Config(width=4, tuning=LoRAConfig(rank=2, targets="all"))
    assert "this backbone is small_cnn" in write_adapter(own, own.build(), tmp_path)
    scratch = Timm.Config(model="test_vit", tuning=LoRAConfig(rank=2))
    assert "no pretrained weights" in write_adapter(scratch, scratch.build(), tmp_path)
    assert list(tmp_path.iterdir()) == []
