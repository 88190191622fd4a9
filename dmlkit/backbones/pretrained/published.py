"""How images were prepared for published weights: what ``transform: {name: pretrained}`` takes over."""

from math import floor
from typing import Any, NamedTuple

from dmlkit.backbones.pretrained.weights import is_file, named_weights
from dmlkit.errors import UserError


class PublishedInput(NamedTuple):
    """The evaluation that weights were published with.

    Args:
        size: side of the square that the network sees, pixels.
        crop: side of that square over the side of the resized image that it is cut out of.
        square: the image is squeezed to a square before the crop; otherwise its shape is kept.
        interpolation: between pixels.
        mean: of red, green and blue in 0..1.
        std: likewise.
    """

    size: int
    crop: float
    square: bool
    interpolation: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def keys(self, size: int | None = None) -> dict[str, Any]:
        """The keys of a transform; ``size`` pixels instead of the published ones are cut out of the same share.

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
    """What timm's settings of a model's weights say.

    Args:
        model: its name, for errors.
        settings: timm's ``PretrainedCfg``, or what has its fields.
        image_size: another size than the published one.

    Raises:
        UserError: no transform here does that.
    """
    channels, height, width = settings.input_size
    if channels != 3 or height != width:
        raise UserError(f"backbone.model: {model} takes {channels} x {height} x {width} pixels, dmlkit's are 3 x N x N")
    if settings.crop_mode not in ("center", "squash"):
        raise UserError(
            f"transform.name: the images of {model} are prepared by {settings.crop_mode!r}, which pretrained cannot; "
            "expected another transform, e.g. imagenet"
        )
    square = settings.crop_mode == "squash"
    size, mean, std = image_size or height, tuple(settings.mean), tuple(settings.std)
    return PublishedInput(size, settings.crop_pct, square, settings.interpolation, mean, std)


def torchvision_input(model: str, weights: str | None) -> PublishedInput:
    """What torchvision's weights of a model say; ``weights`` as in a recipe.

    Raises:
        UserError: there are no such weights, or they are a file's, which says nothing.

    Example:
        >>> torchvision_input("resnet50", "imagenet").keys()["resize"]
        232
    """
    if weights is None or is_file(weights):
        came = "null" if weights is None else "a file, which does not say it"
        raise UserError(
            "transform.name: pretrained is the preprocessing of published weights, and backbone.weights is "
            f"{came}; expected another transform, e.g. imagenet"
        )
    from torchvision.models import get_model_weights

    preset: Any = named_weights(get_model_weights(model), weights).transforms()
    (crop,), (resize,) = preset.crop_size, preset.resize_size
    interpolation = preset.interpolation.value
    return PublishedInput(crop, crop / resize, False, interpolation, tuple(preset.mean), tuple(preset.std))
