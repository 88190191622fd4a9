"""The published preprocessing: against timm's and torchvision's own pipelines, and kept in what a run keeps."""

from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from torchvision import models
from torchvision.transforms.functional import pil_to_tensor

from dmlkit.backbones.timm import timm_input
from dmlkit.errors import UserError
from dmlkit.recipe.file import dump_recipe, parse_recipe
from dmlkit.recipe.reference import schema
from dmlkit.recipe.schema import Recipe
from dmlkit.transforms.presets import PretrainedConfig
from tests.datasets import trees
from tests.processes import Forked

RECIPE = "dataset: {name: glyphs}\nloss: {name: proxy_anchor}\n"


def read(backbone: str, transform: str = "", *overrides: str) -> Recipe:
    text = f"{RECIPE}backbone: {{name: {backbone}}}\ntransform: {{name: pretrained{transform}}}"
    return parse_recipe(text, "r.yaml", overrides)


def pixels_and_image(path: Path) -> tuple[torch.Tensor, Image.Image]:
    with Image.open(trees.photo(path / "photo.jpg", 3, side=(500, 375))) as image:
        image.load()
    return pil_to_tensor(image), image


def normalized(recipe: Recipe, pixels: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (recipe.transform.mean, recipe.transform.std))
    return (recipe.transform.evaluation()(pixels) / 255 - mean) / std


@pytest.mark.parametrize(
    "model",
    [
        "tf_efficientnet_lite0",
        "vit_small_patch14_dinov2.lvd142m",
        "vit_small_patch16_dinov3.lvd1689m",
        "vit_base_patch16_siglip_224.webli",
        "convnext_tiny.fb_in22k_ft_in1k",
        "swin_tiny_patch4_window7_224.ms_in1k",
        "beitv2_base_patch16_224.in1k_ft_in22k",
        "vit_so400m_patch14_siglip_378.webli",
    ],
)
def test_evaluation_is_timms_own(model: str, tmp_path: Path):
    settings = timm.get_pretrained_cfg(model).to_dict()
    theirs = create_transform(**resolve_data_config(pretrained_cfg=settings), is_training=False)
    pixels, image = pixels_and_image(tmp_path)
    recipe = read(f"timm, model: {model}, weights: pretrained")
    difference = (normalized(recipe, pixels) - theirs(image)).abs()  # Pillow's and torch's resampling round apart
    assert difference.max() <= 2.01 / 255 / min(recipe.transform.std)


def test_sizes_are_timms_own_for_all_its_weights():
    found = set()
    for name in timm.list_models(pretrained=True):
        settings = timm.get_pretrained_cfg(name)
        if settings.input_size[1] == settings.input_size[2] and settings.crop_mode != "border":
            found.add((settings.input_size[-1], settings.crop_pct))
            keys = timm_input(name, settings, None).keys()
            pipeline = create_transform(settings.input_size, crop_pct=settings.crop_pct, crop_mode="squash")
            assert (keys["resize"], keys["resize"]) == tuple(pipeline.transforms[0].size), name
            if settings.crop_pct <= 1:  # three crop more than there is, which a transform here refuses
                PretrainedConfig(**keys | {"mean": tuple(keys["mean"]), "std": tuple(keys["std"])})
    assert len(found) > 50


@pytest.mark.parametrize(
    ("backbone", "weights"),
    [
        ("resnet50, weights: imagenet", models.ResNet50_Weights.IMAGENET1K_V2),
        ("resnet50, weights: IMAGENET1K_V1", models.ResNet50_Weights.IMAGENET1K_V1),
        ("resnet18, weights: imagenet", models.ResNet18_Weights.DEFAULT),
        ("resnet101, weights: imagenet", models.ResNet101_Weights.DEFAULT),
        ("googlenet, weights: imagenet", models.GoogLeNet_Weights.DEFAULT),
        ("convnext, size: base, weights: imagenet", models.ConvNeXt_Base_Weights.DEFAULT),
        ("vit, weights: imagenet", models.ViT_B_16_Weights.DEFAULT),
    ],
)
def test_evaluation_is_torchvisions_own(backbone: str, weights: models.WeightsEnum, tmp_path: Path):
    pixels, image = pixels_and_image(tmp_path)
    recipe = read(backbone)
    assert (normalized(recipe, pixels) - weights.transforms()(image)).abs().max() <= 2.01 / 255 / 0.224


def test_a_run_keeps_the_values_and_needs_timm_no_more():
    recipe = read("timm, model: vit_small_patch14_dinov2, weights: pretrained, image_size: 224")
    assert (recipe.transform.size, recipe.transform.resizing.side) == (224, 224)
    kept = dump_recipe(recipe)
    assert "resize: 224" in kept and "interpolation: bicubic" in kept and parse_recipe(kept, "again.yaml") == recipe
    without = "import sys\nassert 'timm' not in sys.modules\nsys.modules['timm'] = None\n"
    process = Forked(exec, f"{without}from dmlkit.recipe.file import parse_recipe\nparse_recipe({kept!r}, 'r')")
    said, _ = process.communicate()
    assert process.returncode == 0, said


def test_given_keys_stay_and_resize_follows_size():
    recipe = read("timm, model: tf_efficientnet_lite0, weights: imagenet", ", size: 112, min_scale: 0.5, flip: false")
    assert (recipe.transform.size, recipe.transform.resizing.side) == (112, 128)
    assert recipe.transform.min_scale == 0.5 and recipe.transform.mean == (0.5, 0.5, 0.5) and not recipe.transform.flip
    assert read("resnet50, weights: imagenet", "", "transform.size=448").transform.resizing.side == 464
    assert read("resnet50, weights: imagenet", ", resize: 224").transform.resizing.side == 224


def test_a_mean_beyond_the_pixels_is_refused_unless_a_run_has_it():
    text = f"{RECIPE}transform: {{name: plain, mean: [123.7, 116.3, 103.5], std: [58.4, 57.1, 57.4]}}"
    with pytest.raises(UserError, match=r"^r.yaml:3: transform: mean: got \[123.7, .*pixels in 0..1; divide mean and"):
        parse_recipe(text, "r.yaml")
    assert parse_recipe(text, "r.yaml", is_trained=True).transform.mean[0] == 123.7
    assert parse_recipe(text, "r.yaml", ["transform.pixel_max=255"]).transform.mean[0] == 123.7


@pytest.mark.parametrize(
    ("backbone", "transform", "fault"),
    [
        ("small_cnn", "", "r.yaml:4: transform.name: pretrained uses the preprocessing published with the weights"),
        ("resnet50", "", "published with the weights, but backbone.weights is null; use another"),
        ("resnet50, weights: swav.pth", "", "backbone.weights is a file, whose preprocessing is unknown; use another"),
        ("resnet50, weights: imgnet", "", "r.yaml:3: backbone.weights: unknown weights 'imgnet'"),
        ("bn_inception, weights: x.pth", "", "no preprocessing is known for the weights of bn_inception"),
        ("timm, model: resnet19", "", "r.yaml:3: backbone.model: timm has no 'resnet19'"),
        ("timm, model: vit_base_patch16_sapiens2, weights: pretrained", "", "takes images of 3 x 1024 x 768"),
        ("timm, model: deepseek_vit_412m, weights: pretrained", "", "are cropped with crop_mode 'border', which"),
        ("timm, model: resnet18, weight: x", "", "r.yaml:3: backbone.weight: unknown key; did you mean 'weights'?"),
        ("resnet50, weights: imagenet", ", size: big", "r.yaml:4: transform.size: got 'big', expected a valid integer"),
        ("resnet50, weights: imagenet", ", size: 300, resize: 256", "size 300 cannot be cropped from images"),
        ("resnet50, weights: imagenet", ", interpolation: box", "interpolation: got 'box', expected 'bilinear'"),
        ("vit, weights: imagenet", ", size: 256", "vit needs transform.size 224, got 256"),
    ],
)  # fmt: skip
def test_what_is_not_published_is_told_in_one_line(backbone: str, transform: str, fault: str):
    with pytest.raises(UserError) as error:
        read(backbone, transform)
    assert fault in str(error.value) and "\n" not in str(error.value)


def test_the_schema_asks_for_none_of_the_keys():
    assert schema()["$defs"]["PretrainedConfig"].get("required", []) == []
