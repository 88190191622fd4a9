"""Augmentations: torchvision's pixels of the same crop, by torchvision's names and defaults, the same after a stop."""

import re
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from dmlkit.distributed.stopping import TrainingStoppedError
from dmlkit.errors import UserError
from dmlkit.loading.batches import TrainingBatches, make_loader
from dmlkit.loading.inputs import TransformedImages
from dmlkit.recipe.file import dump_recipe, parse_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.testing import check_augmentation
from dmlkit.transforms.augmentations import AugmentationConfig
from tests.conftest import TINY_RECIPE, refuses
from tests.training.test_train import assert_equal_weights, weights
from tests.training.test_tuning import Stopper, trained
from tests.transforms.test_cropping import Pictures

BILINEAR = InterpolationMode.BILINEAR
EXAMPLES: dict[str, tuple[str, v2.Transform]] = {
    "auto_augment": ("policy: svhn, p: 0.9", v2.RandomApply([v2.AutoAugment(AutoAugmentPolicy.SVHN)], 0.9)),
    "color_jitter": (
        "brightness: 0.4, contrast: [0.5, 1.5], saturation: 0.2, hue: 0.1, p: 0.8",
        v2.RandomApply([v2.ColorJitter(0.4, (0.5, 1.5), 0.2, 0.1)], 0.8),
    ),
    "gaussian_blur": ("kernel_size: 5", v2.GaussianBlur(5)),
    "rand_augment": (
        "num_ops: 3, magnitude: 12, interpolation: bilinear, fill: [9, 20, 30]",
        v2.RandAugment(3, 12, interpolation=BILINEAR, fill=[9, 20, 30]),
    ),
    "random_affine": (
        "degrees: 20, translate: [0.2, 0.1], scale: [0.8, 1.2], shear: 10, fill: 7",
        v2.RandomAffine(20, (0.2, 0.1), (0.8, 1.2), 10, fill=7),
    ),
    "random_erasing": ("p: 0.9, value: [120, 110, 100]", v2.RandomErasing(0.9, value=[120, 110, 100])),
    "random_grayscale": ("p: 0.5", v2.RandomGrayscale(0.5)),
    "random_horizontal_flip": ("p: 0.4", v2.RandomHorizontalFlip(0.4)),
    "random_perspective": ("distortion_scale: 0.3, fill: 50", v2.RandomPerspective(0.3, fill=50)),
    "random_rotation": ("degrees: [-20, 70], interpolation: bilinear", v2.RandomRotation((-20, 70), BILINEAR)),
    "random_solarize": ("threshold: 128", v2.RandomSolarize(128)),
    "random_vertical_flip": ("p: 0.4", v2.RandomVerticalFlip(0.4)),
    "trivial_augment": ("", v2.TrivialAugmentWide()),
}


def entry(name: str, keys: str) -> str:
    return f"{{name: {name}{', ' if keys else ''}{keys}}}"


def recipe_with(*entries: str, transform: str = "name: imagenet, size: 24, resize: 24") -> Recipe:
    text = TINY_RECIPE.replace("{name: plain, size: 16}", f"{{{transform}, augment: [{', '.join(entries)}]}}")
    return parse_recipe(text, "r.yaml")


def config_of(name: str, keys: str) -> AugmentationConfig:
    return recipe_with(entry(name, keys)).transform.augment[0]


def test_every_augmentation_has_an_example():
    assert EXAMPLES.keys() == {name for name, one in AugmentationConfig.variants.items() if "dmlkit." in one.__module__}


@pytest.mark.parametrize("name", EXAMPLES)
def test_contract(name: str):
    check_augmentation(config_of(name, EXAMPLES[name][0]))


@pytest.mark.parametrize("name", EXAMPLES)
def test_pixels_are_those_of_torchvision_for_the_same_crop(name: str):
    keys, theirs = EXAMPLES[name]
    transform = recipe_with(entry(name, keys)).transform
    pictures, changed = Pictures(), 0
    images, crop = TransformedImages(pictures, transform, training=True), transform.training()
    for index in (0, 1):
        for seed in range(6):
            torch.manual_seed(seed)
            square = crop(pictures.sample(index))
            expected = theirs(square)
            found = images[index, seed].input
            assert isinstance(found, Tensor) and torch.equal(found, expected)
            changed += not torch.equal(expected, square)
    assert changed
    evaluated = TransformedImages(pictures, transform, training=False)[0, 0].input
    assert isinstance(evaluated, Tensor) and torch.equal(evaluated, transform.evaluation()(pictures.sample(0)))


@pytest.mark.parametrize("name", EXAMPLES)
def test_keys_and_defaults_are_those_of_torchvision(name: str):
    config: Any = AugmentationConfig.variants[name]
    theirs = signature(getattr(v2, config.transform)).parameters
    none = {"brightness", "contrast", "saturation", "hue"}  # 0 is None to torchvision
    for key, field in config.model_fields.items():
        if key in ("name", "p") and key not in theirs:
            continue
        default = theirs[key].default
        if default is Parameter.empty:
            assert field.is_required(), key
        else:
            plain = default.value if isinstance(default, InterpolationMode | AutoAugmentPolicy) else default
            assert field.default == (0 if key in none else plain), key


ALL = [entry(name, keys) for name, (keys, _) in EXAMPLES.items()]


def test_an_epoch_that_starts_in_its_middle_has_the_same_pixels():
    recipe = recipe_with(*ALL, transform="name: plain, size: 16")
    dataset = recipe.dataset.build("train")
    batches = TrainingBatches(recipe.sampler.build(dataset.labels, 0), seed=recipe.seed)
    images = TransformedImages(dataset, recipe.transform, training=True)
    epochs: list[list[Tensor]] = []
    for epoch, start in ((0, 0), (1, 0), (1, 1)):
        batches.epoch, batches.start = epoch, start
        torch.rand(epoch + start)  # the state of the model's random numbers does not matter
        epochs.append([batch.inputs for batch in make_loader(images, batches, workers=0, pin_memory=False)])
    assert len(epochs[2]) == len(epochs[1]) - 1 > 0
    assert all(torch.equal(one, other) for one, other in zip(epochs[1][1:], epochs[2], strict=True))
    assert not torch.equal(epochs[0][0], epochs[1][0])


def test_a_run_with_every_augmentation_that_is_stopped_ends_with_the_same_bits(tmp_path: Path):
    text = TINY_RECIPE.replace("{name: plain, size: 16}", f"{{name: plain, size: 16, augment: [{', '.join(ALL)}]}}")
    text = text.replace("epochs: 3", "epochs: 2")
    whole = weights(trained(tmp_path / "whole", text=text))
    with pytest.raises(TrainingStoppedError):
        trained(tmp_path / "stopped", text=text, progress=Stopper(1, last=False))
    stopped = RunFolder(tmp_path / "stopped").load_checkpoint("last")
    assert (stopped["epoch"], stopped["step"]) == (1, 1)
    assert_equal_weights(weights(trained(tmp_path / "stopped", text=text, resume=True)), whole)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("color_jitter", "contrast: [1.5, 0.5]", "contrast: got [1.5, 0.5], expected the lower number first"),
        ("color_jitter", "p: 0.8", "color_jitter changes nothing; set brightness, contrast, saturation or hue"),
        ("color_jitter", "brigtness: 1", "brigtness: unknown key; did you mean 'brightness'?"),
        ("color_jiter", "", "name: unknown augmentation 'color_jiter'; did you mean 'color_jitter'? or load"),
        ("gaussian_blur", "", "kernel_size: this key is missing and has no default; add it"),
        ("gaussian_blur", "kernel_size: 4", "kernel_size: got 4, expected an odd number"),
        ("gaussian_blur", "kernel_size: 25", "kernel_size: got 25, expected at most the size 24 of an image"),
        ("random_erasing", "value: [1, 2]", "value.2: this item of the list is missing and has no default; add it"),
        ("random_erasing", "value: [1, 2, 300]", "value.2: got 300, expected less than or equal to 255"),
        ("random_rotation", "degrees: [-1.0e308, 0]", "degrees.0: got -1e+308, expected greater than or equal to -360"),
        ("random_affine", "degrees: 0, scale: [1.0e-308, 1]", "scale.0: got 1e-308, expected greater than or equal"),
    ],
)
def test_a_wrong_key_is_one_line_when_the_recipe_is_read(name: str, keys: str, message: str):
    with pytest.raises(UserError) as caught:
        recipe_with(entry(name, keys))
    assert re.fullmatch(rf"r.yaml:3: transform(\.|: )augment.0(\.|: ){re.escape(message)}.*", str(caught.value))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("color_jitter", "brightness: 255, contrast: 255, saturation: 255, hue: 0.5"),
        ("gaussian_blur", "kernel_size: 23, sigma: [0.01, 1000]"),
        ("rand_augment", "num_ops: 14, magnitude: 255, num_magnitude_bins: 256"),
        ("rand_augment", "num_ops: 14, magnitude: 0, num_magnitude_bins: 2"),
        ("random_affine", "degrees: [-360, 360], translate: [1, 1], scale: [0.01, 100], shear: 89.999"),
        ("random_erasing", "p: 1, scale: [0, 1], ratio: [0.01, 100]"),
        ("random_perspective", "p: 1, distortion_scale: 1"),
        ("random_rotation", "degrees: 180"),
        ("random_solarize", "p: 1, threshold: 0"),
        ("trivial_augment", "num_magnitude_bins: 256"),
    ],
)
def test_what_a_recipe_allows_is_computed(name: str, keys: str):
    change, generator = config_of(name, keys).build(), torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (3, 24, 24), dtype=torch.uint8, generator=generator)
    for seed in range(100):
        torch.manual_seed(seed)
        assert change(image).shape == image.shape


def test_a_color_jitter_of_0_is_one_value_of_a_study_and_a_run_with_all_keys_stays_readable():
    recipe = recipe_with("{name: color_jitter, brightness: 0}")
    image = torch.arange(48, dtype=torch.uint8).reshape(3, 4, 4)
    assert torch.equal(recipe.transform.augment[0].build()(image), image)
    assert parse_recipe(dump_recipe(recipe), "recipe.yaml") == recipe


def test_a_recipe_can_be_written_and_read():
    recipe = recipe_with(*ALL)
    assert parse_recipe(dump_recipe(recipe), "r.yaml") == recipe
    assert [one["name"] for one in TypeAdapter(Any).dump_python(recipe.transform)["augment"]] == [*EXAMPLES]


PLUGIN = """
from typing import Literal
from torch import Tensor
from dmlkit.transforms.augmentations import AugmentationConfig, ImageTransform, RandomErasingConfig


class NegativeConfig(AugmentationConfig, frozen=True):
    'Every color inverted.'

    name: Literal["negative"] = "negative"

    def build(self) -> ImageTransform:
        return invert


def invert(image: Tensor) -> Tensor:
    return 255 - image


class OftenErasedConfig(RandomErasingConfig, frozen=True):
    'Another default.'

    name: Literal["often_erased"] = "often_erased"
    p: float = 0.9
"""


def test_a_plugin_can_add_an_augmentation(plugin: Callable[[str], None]):
    plugin(PLUGIN)
    recipe = recipe_with(entry("negative", ""), transform="name: plain, size: 16")
    dataset = recipe.dataset.build("train")
    found = TransformedImages(dataset, recipe.transform, training=True)[3, 0].input
    assert isinstance(found, Tensor) and torch.equal(found, 255 - dataset.sample(3))
    derived = AugmentationConfig.variants["often_erased"]().build()
    assert isinstance(derived, v2.RandomErasing) and derived.p == 0.9


@pytest.mark.parametrize("key", ["augment", "training_size"])
def test_what_would_ignore_an_augmentation_is_rejected(key: str):
    transforms = {"augment": "{name: plain, size: 16, augment: [{name: random_erasing}]}"}
    transforms["training_size"] = "{name: imagenet, size: 32, training_size: 16}"
    changes = f"transform={transforms[key]}", "backbone={name: resnet18, tuning: {name: none}}"
    message = f"transform.{key}: features are cached without augmentation; set backbone.tuning.feature_views, or remove"
    refuses(message, parse_recipe, TINY_RECIPE, "r.yaml", changes)
    for tuning in ("feature_views=2", "features=live"):
        assert parse_recipe(TINY_RECIPE, "r.yaml", (*changes, f"backbone.tuning.{tuning}")).transform is not None
