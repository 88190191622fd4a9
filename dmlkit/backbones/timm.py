"""Any image model of timm, by name."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone, BackboneConfig, blocks_in
from dmlkit.backbones.pretrained.weights import input_requirements, is_file, load_weights
from dmlkit.component import Requirement, one_of
from dmlkit.errors import UserError
from dmlkit.pooling.base import Pooling, PoolingConfig

RESNET, REGNET = ("layer1", "layer2", "layer3", "layer4"), ("s1", "s2", "s3", "s4")
CONTAINERS = (("blocks",), ("stages",), ("layers",), RESNET, REGNET)
"""Where timm's models keep blocks: ViTs and EfficientNets, ConvNeXts, Swins, and so on."""


class TimmConfig(BackboneConfig, frozen=True):
    """A model of timm by name, e.g. vit_small_patch16_224.dino; needs pip install 'dmlkit[timm]'."""

    name: Literal["timm"] = "timm"
    model: str = Field(min_length=1)
    """Name in timm, e.g. ``vit_small_patch16_224``."""
    weights: str | None = None
    """``pretrained``, or a file; null trains from scratch."""
    pooling: Annotated[PoolingConfig, one_of] | None = None
    """How the backbone's map of features becomes one vector; null takes the model's own."""

    def create(self) -> "Timm":
        return Timm(self.model, weights=self.weights, pooling=self.pooling.build() if self.pooling else None)

    def requirements(self) -> Iterable[Requirement]:
        published = published_settings(self.model)
        if published is None:
            return
        if published.fixed_input_size:
            yield Requirement("transform.size", (published.input_size[-1],), f"{self.model} takes no other")
        if self.weights is None or is_file(self.weights):
            return
        statistics = {"mean": tuple(published.mean), "std": tuple(published.std), "channels": "rgb", "pixel_max": 1}
        yield from input_requirements(statistics, "these weights were trained with these statistics")


def published_settings(model: str) -> Any:
    """timm's settings of a model's weights; None without timm or without such a model, which `Timm` reports."""
    try:
        import timm

        return timm.get_pretrained_cfg(model)
    except (ImportError, RuntimeError):
        return None


class Timm(Backbone):
    """A model of timm without its classifier.

    Args:
        model: name, with a tag for one of several weights, e.g. ``resnet50.a1_in1k``.
        weights: ``"pretrained"`` downloads timm's, a path loads a file, None starts at random.
        pooling: of the last feature map, in place of the model's own pooling and what follows it.

    Raises:
        UserError: timm is missing or has no such model, or the weights cannot be had.
    """

    def __init__(self, model: str, *, weights: str | None = None, pooling: Pooling | None = None) -> None:
        super().__init__()
        if weights is not None and weights != "pretrained" and not is_file(weights):
            raise UserError(f"backbone.weights: got {weights!r}, expected pretrained or a file")
        self.network = create(model, pretrained=weights == "pretrained")
        if weights is not None and weights != "pretrained":
            load_weights(self.network, Path(weights))
        self.num_features: int = self.network.num_features
        self.pooling = pooling

    def blocks(self) -> list[nn.Module]:
        names = {name for name, _ in self.network.named_children()}
        for containers in CONTAINERS:
            if names.issuperset(containers):
                return blocks_in(self.network, *containers)
        raise UserError(
            f"backbone.tuning: {type(self.network).__name__} keeps its blocks where dmlkit does not know them; "
            "expected another tuning than last_blocks"
        )

    def forward(self, images: Tensor) -> Tensor:
        if self.pooling is None:
            return self.network(images)
        features: Tensor = self.network.forward_features(images)
        if features.ndim == 3:  # tokens (B, T, C), those of the class and of registers before the patches
            first: int = getattr(self.network, "num_prefix_tokens", 0)
            maps = features[:, first:].transpose(1, 2)[..., None]
            return self.pooling(maps, features[:, 0] if first else None)
        if getattr(self.network, "output_fmt", "NCHW") == "NHWC":
            features = features.permute(0, 3, 1, 2)
        return self.pooling(features)


def create(model: str, *, pretrained: bool) -> Any:
    """timm's model without its classifier.

    Raises:
        UserError: timm is missing or has no such model, or the weights cannot be downloaded.
    """
    try:
        import timm
    except ImportError:
        raise UserError("backbone.name: timm is not installed; install it with: pip install 'dmlkit[timm]'") from None
    if not timm.is_model(model):
        near = timm.list_models(f"*{model.split('.')[0]}*")[:3]
        hint = f"did you mean {', '.join(near)}?" if near else "see timm.list_models()"
        raise UserError(f"backbone.model: timm has no {model!r}; {hint}")
    try:
        return timm.create_model(model, pretrained=pretrained, num_classes=0)
    except (OSError, RuntimeError, ValueError) as error:  # no network | an unknown tag | a damaged download
        if not pretrained:
            raise
        published = timm.get_pretrained_cfg(model, allow_unregistered=True)
        source = f"model.safetensors of https://huggingface.co/{published.hf_hub_id}" if published else "its weights"
        raise UserError(
            f"backbone.weights: cannot download {model} ({str(error).splitlines()[0]}); get {source} on a machine with "
            "network and give the file's path as backbone.weights, or set that to null"
        ) from error
