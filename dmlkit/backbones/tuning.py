"""Tuning: which weights of a pretrained backbone are trained."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dmlkit.component import ComponentConfig, Requirement, import_on_demand
from dmlkit.errors import OptionError
from dmlkit.pooling import Pooling

__all__ = [
    "FullTuningConfig",
    "LastBlocksConfig",
    "LoRAConfig",
    "LowRankUpdate",
    "NoTuningConfig",
    "StoredOutput",
    "TuningConfig",
]


Blocks = Callable[[], list[nn.Module]]
"""Function that returns the blocks of a backbone from input to output, or raises UserError if it has none."""
Cache = Annotated[str, Field(min_length=1)] | None


class StoredOutput(NamedTuple):
    """What the frozen layers compute once for each image, before the first step."""

    views: int  # number of augmented views; 0 for one as in evaluation
    folder: str | None  # folder that several runs may share; None for that of the run

    def requirements(self) -> Iterator[Requirement]:
        """Yield what training on stored features does not go together with."""
        yield Requirement("dataset.on_bad_image", ("error",), "features are stored for all images (or train live)")
        yield Requirement("training.compile", (False,), "with stored features the frozen layers run only once")
        if self.views:
            yield Requirement("transform.augments", (True,), "without augmentation all views of an image are equal")


class TuningConfig(ComponentConfig, frozen=True):
    """Root of the tuning family. With every tuning, all weights of the head and the loss train."""

    @abstractmethod
    def trained_modules(self, backbone: nn.Module, blocks: Blocks) -> list[nn.Module]:
        """Return the modules that train, with their submodules; the rest of the backbone is frozen."""

    def adapt(self, backbone: nn.Module) -> None:
        """Add trainable parameters to the frozen modules; the default adds none."""

    def stored(self) -> StoredOutput | None:
        """Return what the frozen layers compute once; None if all layers run in every step."""
        return None


def poolings(backbone: nn.Module) -> list[nn.Module]:
    """Return the pooling modules of a backbone, which follow its blocks and train if they have parameters."""
    return [module for module in backbone.modules() if isinstance(module, Pooling)]


class FullTuningConfig(TuningConfig, frozen=True):
    """All weights of the backbone train."""

    name: Literal["full"] = "full"

    def trained_modules(self, backbone: nn.Module, blocks: Blocks) -> list[nn.Module]:
        return [backbone]


class NoTuningConfig(TuningConfig, frozen=True):
    """The backbone is frozen, with its batch norms and dropout; head and loss train on its features.

    The features are computed once, before the first step, so that an epoch takes seconds.
    """

    name: Literal["none"] = "none"
    features: Literal["cached", "live"] = "cached"
    """``cached`` computes features once; ``live`` augments the images and computes their features in every step."""
    feature_views: NonNegativeInt = 0
    """Number of augmented views to cache per image; each step uses one of them. 0 caches one view without
    augmentation, as in evaluation."""
    cache: Cache = None
    """Folder for cached features, which several runs may share; null keeps them in the run folder."""
    engine: Literal["torch", "onnxruntime", "bf16"] = "torch"
    """Runtime that computes the cached features of training images: torch in float32, ONNX Runtime, or torch in
    bfloat16. Those of validation and test images are always torch's in float32."""

    @model_validator(mode="after")
    def check_cache(self) -> "NoTuningConfig":
        """Reject keys that live features would ignore."""
        if self.features == "live" and (self.feature_views or self.cache is not None or self.engine != "torch"):
            raise ValueError(
                "feature_views, cache and engine need features: cached; remove them, or remove features: live"
            )
        return self

    def stored(self) -> StoredOutput | None:
        return StoredOutput(self.feature_views, self.cache) if self.features == "cached" else None

    def trained_modules(self, backbone: nn.Module, blocks: Blocks) -> list[nn.Module]:
        return []

    def requirements(self) -> Iterable[Requirement]:
        frozen = "no weight of the backbone trains"
        yield Requirement("backbone.freeze_epochs", (0,), frozen)
        yield Requirement("training.gradient_checkpointing", (False,), frozen)
        yield Requirement("training.gradient_cache", (None,), frozen)
        if stored := self.stored():
            yield from stored.requirements()
        yield Requirement("optimizer.lr_multipliers.backbone", (1.0,), frozen)


class LastBlocksConfig(TuningConfig, frozen=True):
    """The last blocks and the layers after them train; earlier layers are frozen and need no backward pass."""

    name: Literal["last_blocks"] = "last_blocks"
    blocks: PositiveInt = 1
    """Number of blocks. A block is a residual, transformer or inception block; in timm's ConvNeXt, Swin and
    EfficientNet it is a stage."""
    feature_views: NonNegativeInt | None = None
    """Number of augmented views of each image whose maps before these blocks are computed once and stored, in float16;
    each step uses one of them. 0 stores one without augmentation, in float32; null runs all layers in every step."""
    cache: Cache = None
    """Folder for stored maps, which several runs may share; null keeps them in the run folder."""

    @model_validator(mode="after")
    def check_cache(self) -> "LastBlocksConfig":
        """Reject a folder that nothing is stored in."""
        if self.cache is not None and self.feature_views is None:
            raise ValueError("cache needs feature_views, the number of views to store; set it, or remove cache")
        return self

    def stored(self) -> StoredOutput | None:
        return None if self.feature_views is None else StoredOutput(self.feature_views, self.cache)

    def requirements(self) -> Iterable[Requirement]:
        if stored := self.stored():
            yield from stored.requirements()

    def trained_modules(self, backbone: nn.Module, blocks: Blocks) -> list[nn.Module]:
        all_blocks = blocks()
        if self.blocks > len(all_blocks):
            raise OptionError(
                "backbone.tuning.blocks",
                f"got {self.blocks}, expected at most {len(all_blocks)}, the number of blocks of "
                "this backbone; to train all weights use tuning: {name: full}",
            )
        return [*all_blocks[-self.blocks :], *poolings(backbone)]


class LoRAConfig(TuningConfig, frozen=True):
    """Low-rank adaptation (Hu et al. 2022): all weights are frozen, and small low-rank updates of them train."""

    name: Literal["lora"] = "lora"
    rank: PositiveInt = 8
    """Rank r of each update. A weight gets no update if the update would have as many numbers as the weight."""
    alpha: PositiveFloat = 16.0
    """Updates are multiplied by alpha / rank, so that the learning rate need not change with the rank."""
    targets: Literal["attention", "all"] = "attention"
    """``attention``: update the weights of attention layers; ``all``: of every linear layer and convolution."""

    def trained_modules(self, backbone: nn.Module, blocks: Blocks) -> list[nn.Module]:
        return poolings(backbone)

    def adapt(self, backbone: nn.Module) -> None:
        tops = [backbone]
        if self.targets == "attention":  # layers of torch or timm, which all have "Attention" in their class name
            tops = [module for module in backbone.modules() if "Attention" in type(module).__name__]
        targeted = dict.fromkeys(weight for top in tops for weight in weights(top))
        if not targeted:
            raise OptionError(
                "backbone.tuning.targets", f"got {self.targets}, but this backbone has no attention layers; use all"
            )
        shapes = {weight: getattr(*weight).flatten(1).shape for weight in targeted}
        fitting = [weight for weight, shape in shapes.items() if self.rank * sum(shape) < prod(shape)]
        if not fitting:
            raise OptionError(
                "backbone.tuning.rank",
                f"got {self.rank}, but no update of this rank has fewer values than its weight; use a smaller rank",
            )
        for module, name in fitting:
            update = LowRankUpdate(getattr(module, name), rank=self.rank, alpha=self.alpha)
            parametrize.register_parametrization(module, name, update)


class LowRankUpdate(nn.Module):
    r"""Low-rank update of a weight matrix, Hu et al., ICLR 2022 (arXiv:2106.09685), eq. 3.

    .. math:: W' = W + \frac{\alpha}{r} B A

    A is initialized from a normal distribution, B with 0. The update is a torch parametrization, so that it fits any
    layer: torch's attention reads ``in_proj_weight`` and ``out_proj.weight`` directly, without a layer to wrap, and
    peft has to merge and unmerge the update at each call.

    Args:
        weight: W (m, n), or the weight (m, ...) of a convolution with n numbers per output.
        rank: r.
        alpha: factor of the update, times r.

    Example:
        >>> layer = nn.Linear(6, 4)
        >>> _ = parametrize.register_parametrization(layer, "weight", LowRankUpdate(layer.weight, rank=1, alpha=2.0))
        >>> [tuple(parameter.shape) for parameter in layer.parametrizations.weight[0].parameters()]
        [(1, 6), (4, 1)]
    """

    def __init__(self, weight: Tensor, *, rank: int, alpha: float) -> None:
        super().__init__()
        rows, columns = weight.flatten(1).shape
        # with this standard deviation A x is as large as x
        self.down = nn.Parameter(columns**-0.5 * torch.randn(rank, columns, dtype=weight.dtype))  # A
        self.up = nn.Parameter(torch.zeros(rows, rank, dtype=weight.dtype))  # B
        self.scale = alpha / rank

    def forward(self, weight: Tensor) -> Tensor:
        """Compute W' from W."""
        with torch.autocast(weight.device.type, enabled=False):  # a product in bfloat16 would be off by 4e-3
            return weight + self.scale * (self.up @ self.down).view(weight.shape)


def weights(backbone: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the weights of linear layers and convolutions, and the input projection of torch's attention."""
    for module in backbone.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            yield module, "weight"
        elif isinstance(module, nn.MultiheadAttention):
            yield module, "in_proj_weight"


import_on_demand(__name__)
