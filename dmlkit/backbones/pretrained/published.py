"""Preprocessing that published weights were evaluated with, for ``transform: {name: pretrained}``."""

from math import floor
from typing import Any, NamedTuple

from dmlkit.backbones.pretrained.weights import is_file, named_weights
from dmlkit.errors import UserError


class PublishedInput(NamedTuple):
    """Evaluation preprocessing of published weights.

    Args:
        size: side of the network's square input, in pixels.
        crop: side of the input divided by the side of the resized image that it is cropped from.
        square: whether the image is squeezed to a square before the crop; otherwise its aspect ratio is kept.
        interpolation: interpolation between pixels.
        mean: mean of red, green and blue in 0..1.
        std: standard deviation of red, green and blue in 0..1.
    """

    size: int
    crop: float
    square: bool
    interpolation: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def keys(self, size: int | None = None) -> dict[str, Any]:
        """Return the keys of a transform; another ``size`` than the published one keeps the crop's proportion.

        Example:
            >>> published = PublishedInput(224, 0.875, False, "bicubic", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
            >>> published.keys()["resize"], published.keys(112)["resize"]
            (256, 128)
        """
        side = size or self.size
        resize = floor(side / self.crop + 1e-6)  # 235 / 0.94 is 249.99999999999997
        shape = {"size": side, "resize": resize, "square": self.square, "interpolation": self.interpolation}
        return {**shape, "mean": list(self.mean), "std": list(self.std)}


def timm_input(model: str, settings: Any, image_size: int | None) -> PublishedInput:
    """Return the preprocessing that timm's settings of a model's weights describe.

    Args:
        model: name of the model, for errors.
        settings: timm's ``PretrainedCfg``, or an object with its fields.
        image_size: size that replaces the published one.

    Raises:
        UserError: dmlkit has no such preprocessing.
    """
    channels, height, width = settings.input_size
    if channels != 3 or height != width:
        raise UserError(
            f"backbone.model: {model} takes images of {channels} x {height} x {width}, expected 3 x N x N; use another "
            "model"
        )
    if settings.crop_mode not in ("center", "squash"):
        raise UserError(
            f"transform.name: the images of {model} are cropped with crop_mode {settings.crop_mode!r}, which "
            "pretrained does not support (center or squash); use another transform, e.g. imagenet"
        )
    square = settings.crop_mode == "squash"
    size, mean, std = image_size or height, tuple(settings.mean), tuple(settings.std)
    return PublishedInput(size, settings.crop_pct, square, settings.interpolation, mean, std)


def torchvision_input(model: str, weights: str | None) -> PublishedInput:
    """Return the preprocessing of torchvision's weights of a model; ``weights`` as in a recipe.

    Raises:
        UserError: there are no such weights, or they are a file, whose preprocessing is unknown.

    Example:
        >>> torchvision_input("resnet50", "imagenet").keys()["resize"]
        232
    """
    if weights is None or is_file(weights):
        found = "null" if weights is None else "a file, whose preprocessing is unknown"
        raise UserError(
            "transform.name: pretrained uses the preprocessing published with the weights, but backbone.weights is "
            f"{found}; use another transform, e.g. imagenet"
        )
    from torchvision.models import get_model_weights

    preset: Any = named_weights(get_model_weights(model), weights).transforms()
    (crop,), (resize,) = preset.crop_size, preset.resize_size
    interpolation = preset.interpolation.value
    return PublishedInput(crop, crop / resize, False, interpolation, tuple(preset.mean), tuple(preset.std))
