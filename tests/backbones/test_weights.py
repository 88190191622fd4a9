"""Weights: what is refused, and what a failed download tells to do."""

import argparse
import json
import re
from contextlib import nullcontext
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save_file

from dmlkit.backbones import ResNet18, ResNet50, Timm
from dmlkit.backbones.base import BackboneConfig
from dmlkit.errors import UserError
from dmlkit.recipe.file import parse_recipe
from tests.conftest import refuses

CAFFE = "channels: bgr, pixel_max: 255, mean: [104, 117, 128], std: [1, 1, 1]"
RECIPE = "dataset: {name: glyphs}\nloss: {name: proxy_anchor}\n"


def test_files_that_are_no_weights(tmp_path: Path):
    (tmp_path / "cut.pth").write_bytes(b"PK\3\4 cut off")
    refuses("cannot read these weights", ResNet18.Config(weights=str(tmp_path / "cut.pth")).build)
    torch.save({"opt": argparse.Namespace(lr=1)}, tmp_path / "pickle.pth")
    pickled = ResNet18.Config(weights=str(tmp_path / "pickle.pth"))
    refuses("cannot read these weights: it holds objects of argparse.Namespace; .*only tensors", pickled.build)
    (tmp_path / "pickle.pth").write_text("no weights")
    refuses("cannot read these weights: it is no file of PyTorch; .*only tensors", pickled.build)
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    refuses("contains no weights", ResNet18.Config(weights=str(tmp_path / "empty.pth")).build)
    state = ResNet18.Config().build().network.state_dict()
    torch.save({key: value for key, value in state.items() if key != "bn1.bias"}, tmp_path / "less.pth")
    with pytest.raises(UserError, match=r"lacks 1 of .* tensors of this backbone, the first being bn1\.bias;"):
        ResNet18.Config(weights=str(tmp_path / "less.pth")).build()
    with pytest.raises(UserError, match=r"lacks .* tensors of this backbone"):
        save_file(dict(state), tmp_path / "resnet18.safetensors")
        ResNet50.Config(weights=str(tmp_path / "resnet18.safetensors")).build()
    assert ResNet18.Config(weights=str(tmp_path / "resnet18.safetensors")).build().num_features == 512


def test_self_supervised_files_load(tmp_path: Path):
    tensors = dict(ResNet50.Config().build().network.state_dict())
    head = {"projection_head.0.weight": torch.zeros(1), "prototypes.weight": torch.zeros(1)}
    torch.save({f"module.{key}": value for key, value in (tensors | head).items()}, tmp_path / "swav.pth.tar")
    student = {key: value + 1 for key, value in tensors.items()}
    dino = {
        part: {f"backbone.{key}": value for key, value in state.items()}
        for part, state in (("teacher", tensors), ("student", student))
    }
    torch.save({**dino, "epoch": 100}, tmp_path / "dino.pth")
    for file in ("swav.pth.tar", "dino.pth"):
        loaded = ResNet50.Config(weights=str(tmp_path / file)).build().network.state_dict()
        assert all(torch.equal(loaded[key], value) for key, value in tensors.items())


def test_a_failed_download_says_which_file_to_put_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from torchvision import models

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def offline(weights=None, **_):
        raise URLError("no route to host")

    monkeypatch.setattr(models, "resnet18", offline)
    with pytest.raises(UserError) as error:
        ResNet18.Config(weights="imagenet").build()
    url = models.ResNet18_Weights.DEFAULT.url
    assert url in str(error.value) and "no route to host" in str(error.value)
    assert str(tmp_path / "hub" / "checkpoints" / url.rsplit("/", 1)[1]) in str(error.value)


def test_timm_models_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch):
    import timm

    refuses("timm has no 'resnet19'", Timm.Config(model="resnet19").build)

    def offline(*_, **__):
        raise OSError("no route to host\nand more")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(
        UserError, match=r"no route to host\); download model\.safetensors of https://huggingface\.co/timm/resnet18\."
    ):
        Timm.Config(model="resnet18", weights="pretrained").build()


def test_timm_poolings_agree_with_timms_own():
    torch.manual_seed(0)
    from dmlkit.pooling import Avg

    images, few = torch.randn(1, 3, 224, 224), {"depths": (1, 1), "num_heads": (3, 6)}
    own, ours = Timm(model="resnet18").eval(), Timm(model="resnet18", pooling=Avg()).eval()
    ours.load_state_dict(own.state_dict())
    swin = Timm(model="swin_tiny_patch4_window7_224", pooling=Avg(), arguments=few).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(images), own(images))
        torch.testing.assert_close(swin(images), swin.network.forward_features(images).mean((1, 2)))


@pytest.mark.parametrize(
    ("backbone", "transform", "fault"),
    [
        ("bn_inception, weights: x.pth", "imagenet", "needs transform.mean (104.0, 117.0, 128.0), got (0.485"),
        ("bn_inception, weights: x.pth", "imagenet", "bn_inception needs transform.channels bgr, got rgb"),
        ("bn_inception, weights: x.pth", "imagenet", "bn_inception needs transform.pixel_max 255, got 1"),
        ("timm, model: test_vit, weights: x.pth", "bn_inception", "timm needs transform.channels rgb, got bgr"),
        ("resnet50, weights: imagenet", "bn_inception", "resnet50 needs transform.channels rgb, got bgr"),
        ("resnet50, weights: imagenet", "hyp_vit", "resnet50 needs transform.mean (0.485, 0.456, 0.406), got (0.5"),
        ("resnet50, weights: swav.pth", "bn_inception", "resnet50 needs transform.pixel_max 1, got 255"),
        ("googlenet, weights: IMAGENET1K_V1", "plain", "googlenet needs transform.std"),
        ("vit, weights: imagenet", "cgml_cars", "vit needs transform.size 224, got 227"),
        ("timm, model: vit_small_patch16_224.dino, weights: pretrained", "hyp_vit", "timm needs transform.mean (0.485"),
        ("timm, model: vit_small_patch16_224.dino", "plain", "timm needs transform.size 224, got 32"),
        ("resnet18, pooling: {name: cls}", "imagenet", "cls needs backbone.name timm or vit, got resnet18"),
        ("bn_inception, weights: x.pth", "bn_inception", None),
        ("bn_inception, weights: x.pth", f"cgml_cars, {CAFFE}", None),
        ("bn_inception", "imagenet", None),
        ("resnet50, weights: imagenet", "imagenet", None),
        ("resnet50, weights: swav.pth", "hyp_vit", None),
        ("googlenet, weights: imagenet", "cgml_cars", None),
        ("vit, weights: imagenet", "imagenet", None),
        ("timm, model: vit_small_patch16_224, weights: pretrained", "hyp_vit", None),
        ("timm, model: vit_small_patch16_224.dino, weights: dino.pth", "hyp_vit", None),
    ],
)  # fmt: skip
def test_models_and_transforms_fit_or_are_refused(backbone: str, transform: str, fault: str | None):
    text = f"{RECIPE}backbone: {{name: {backbone}}}\ntransform: {{name: {transform}}}"
    with nullcontext() if fault is None else pytest.raises(UserError, match=re.escape(fault)):
        parse_recipe(text, "recipe.yaml")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"name": "timm", "model": "resnet18.a1_in1k"}, None),
        ({"name": "timm", "model": "resnet18.a1_in1k", "weights": "pretrained"}, "apache-2.0"),
        ({"name": "timm", "model": "vit_small_patch16_dinov3.lvd1689m", "weights": "pretrained"}, "dinov3-license"),
        ({"name": "timm", "model": "tf_efficientnet_lite0", "weights": "imagenet"}, "apache-2.0"),
        ({"name": "timm", "model": "resnet18", "weights": "mine.pth"}, "unknown"),
        ({"name": "timm", "model": "local-dir:gone", "weights": "pretrained"}, "unknown"),
        ({"name": "resnet18", "weights": "imagenet"}, "unknown"),
        ({"name": "small_cnn"}, None),
    ],
)
def test_the_license_of_weights_is_what_timm_publishes(keys: dict[str, str], expected: str | None):
    pytest.importorskip("timm")
    assert BackboneConfig.variants[keys["name"]](**keys).license() == expected


@pytest.mark.parametrize(
    ("stated", "expected"), [("CC-BY-NC-4.0", "cc-by-nc-4.0"), ("\x1b[31m free", "unknown"), (3, "unknown")]
)
def test_the_license_in_a_folder_is_an_identifier_or_unknown(stated: object, expected: str, tmp_path: Path):
    pytest.importorskip("timm")
    settings = {"input_size": [3, 32, 32], "license": stated}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18", "pretrained_cfg": settings}))
    config = BackboneConfig.variants["timm"](model=f"local-dir:{tmp_path}", weights="pretrained")
    assert config.license() == expected


OF_TORCHVISION = [
    *((name, {}) for name in ("resnet18", "resnet50", "resnet101", "googlenet")),
    *(("convnext", {"size": size}) for size in ("tiny", "small", "base", "large")),
    *(("vit", {"variant": variant}) for variant in ("b_16", "b_32", "l_16", "l_32", "h_14")),
]


@pytest.mark.parametrize(("name", "options"), OF_TORCHVISION)
def test_all_published_weights_of_torchvision_fit_their_network(
    name: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """On a device without memory, with the state of torchvision's own network in place of each download."""
    from torchvision import models

    architecture = "_".join([name, *options.values()])
    for published in models.get_model_weights(architecture):
        own = {"image_size": published.meta["min_size"][0]} if name == "vit" else {}
        own |= {"aux_logits": True, "init_weights": False} if name == "googlenet" else {}
        with torch.device("meta"):
            state = models.get_model(architecture, weights=None, **own).state_dict()
        monkeypatch.setattr(models.WeightsEnum, "get_state_dict", lambda *_, state=state, **__: state)
        keys = {"name": name, **options, "weights": published.name}
        recipe = parse_recipe(f"{RECIPE}backbone: {json.dumps(keys)}\ntransform: {{name: pretrained}}", "r.yaml")
        with torch.device("meta"):
            pretrained = recipe.backbone.build()
            random = recipe.backbone.model_copy(update={"weights": None}).build()
        assert pretrained.state_dict().keys() == random.state_dict().keys()
        side = published.transforms().crop_size[0]
        assert recipe.transform.size == side
        assert pretrained(torch.empty(1, 3, side, side, device="meta")).shape == (1, pretrained.num_features)
