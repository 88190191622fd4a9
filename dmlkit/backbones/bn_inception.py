"""BN-Inception: GoogLeNet with batch norm, the backbone of most published metric-learning results."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone, BackboneConfig
from dmlkit.backbones.pretrained.weights import CAFFE, input_requirements, is_file, load_weights
from dmlkit.component import Requirement, one_of
from dmlkit.errors import OptionError
from dmlkit.pooling import Avg, Pooling, PoolingConfig

URL = "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth"


class BNInceptionConfig(BackboneConfig, frozen=True):
    """BN-Inception (Ioffe & Szegedy 2015), 1 024 features; use it with the transform ``bn_inception``.

    Download its published weights, ``bn_inception-52deb4733.pth``, from data.lip6.fr/cadene.
    """

    name: Literal["bn_inception"] = "bn_inception"
    weights: str | None = None
    """Path of a weights file; null trains from scratch."""
    pooling: Annotated[PoolingConfig, one_of] = Avg.Config()
    """Pooling of the last feature map to one vector."""
    batchnorm_momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Weight of a new batch in the running statistics; Proxy-Anchor's code has 0.9, ProxyGML's and SoftTriple's 0.1."""

    def create(self) -> "BNInception":
        return BNInception(
            weights=self.weights, pooling=self.pooling.build(), batchnorm_momentum=self.batchnorm_momentum
        )

    def check_weights(self) -> None:
        if self.weights is not None and not is_file(self.weights):
            raise OptionError("backbone.weights", f"{self.weights!r}: expected a file, e.g. the download of {URL}")

    def requirements(self) -> Iterable[Requirement]:
        if self.weights is None:
            return []
        return input_requirements(CAFFE, "these weights take BGR pixels in 0..255 (transform: bn_inception)")


class InceptionBlock(NamedTuple):
    """Channels of an inception block; a block without ``one`` halves the sides of the map.

    Args:
        name: name of the block in the published weights.
        one: channels of the 1x1 branch; 0 for no such branch.
        three: channels of the 3x3 branch before and after its 3x3 convolution.
        double: channels of the branch with two 3x3 convolutions before and after them.
        pool: pooling that the last branch starts with.
        projection: channels of the last branch; 0 if the branch only pools.
    """

    name: str
    one: int
    three: tuple[int, int]
    double: tuple[int, int]
    pool: Literal["avg", "max"]
    projection: int

    @property
    def channels(self) -> int:
        """Total output channels of the block's convolutions, without an unprojected pooled input."""
        return self.one + self.three[1] + self.double[1] + self.projection


BLOCKS = (
    InceptionBlock("3a", 64, (64, 64), (64, 96), "avg", 32),
    InceptionBlock("3b", 64, (64, 96), (64, 96), "avg", 64),
    InceptionBlock("3c", 0, (128, 160), (64, 96), "max", 0),
    InceptionBlock("4a", 224, (64, 96), (96, 128), "avg", 128),
    InceptionBlock("4b", 192, (96, 128), (96, 128), "avg", 128),
    InceptionBlock("4c", 160, (128, 160), (128, 160), "avg", 128),
    InceptionBlock("4d", 96, (128, 192), (160, 192), "avg", 128),
    InceptionBlock("4e", 0, (128, 192), (192, 256), "max", 0),
    InceptionBlock("5a", 352, (192, 320), (160, 224), "avg", 128),
    InceptionBlock("5b", 352, (192, 320), (192, 224), "max", 128),
)


class BNInception(Backbone):
    """Network of Ioffe & Szegedy, ICML 2015 (arXiv:1502.03167), figure 5, up to its pooling.

    Layers have the names of the published Caffe and PyTorch weights: ``inception_3a_3x3_reduce`` is a convolution
    with a bias, ``inception_3a_3x3_reduce_bn`` the batch norm that follows, and a ReLU follows both.

    Args:
        weights: path of a file with all 69 convolutions and batch norms; None initializes at random.
        pooling: pooling of the last feature map; None averages.
        batchnorm_momentum: weight of a new batch in the running statistics.

    Raises:
        UserError: the file is missing or belongs to another network.
        ValueError: raised by `forward` if a map cannot be halved; images of 224, 227 and 256 pixels work.
    """

    num_features = 1024

    def __init__(
        self, *, weights: str | None = None, pooling: Pooling | None = None, batchnorm_momentum: float = 0.1
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self._add("conv1_7x7_s2", 3, 64, side=7, momentum=batchnorm_momentum)
        self._add("conv2_3x3_reduce", 64, 64, side=1, momentum=batchnorm_momentum)
        self._add("conv2_3x3", 64, 192, side=3, momentum=batchnorm_momentum)
        channels = 192
        for block in BLOCKS:
            for name, before, after, side in branches(block, channels):
                self._add(name, before, after, side=side, momentum=batchnorm_momentum)
            channels = block.channels if block.one else block.channels + channels
        if weights is not None:
            if not is_file(weights):
                raise OptionError("backbone.weights", f"{weights!r}: expected a file, e.g. the download of {URL}")
            load_weights(self.layers, Path(weights))
        self.pooling = pooling or Avg()

    def _add(self, name: str, before: int, after: int, *, side: int, momentum: float) -> None:
        stride = 2 if name == "conv1_7x7_s2" or is_strided(name) else 1
        self.layers[name] = nn.Conv2d(before, after, side, stride=stride, padding=side // 2)
        self.layers[f"{name}_bn"] = nn.BatchNorm2d(after, momentum=momentum)

    def _apply_layer(self, name: str, maps: Tensor) -> Tensor:
        return torch.relu(self.layers[f"{name}_bn"](self.layers[name](maps)))

    def blocks(self) -> list[nn.Module]:
        prefixes = [f"inception_{block.name}_" for block in BLOCKS]
        layers = list(self.layers.items())
        return [nn.ModuleList([layer for name, layer in layers if name.startswith(start)]) for start in prefixes]

    def forward(self, images: Tensor) -> Tensor:
        maps = halve(self._apply_layer("conv1_7x7_s2", images))
        maps = halve(self._apply_layer("conv2_3x3", self._apply_layer("conv2_3x3_reduce", maps)))
        for block in BLOCKS:
            maps = self._inception(block, maps)
        return self.pooling(maps)

    def _inception(self, block: InceptionBlock, maps: Tensor) -> Tensor:
        prefix = f"inception_{block.name}_"

        def chain(*names: str) -> Tensor:
            result = maps
            for name in names:
                result = self._apply_layer(prefix + name, result)
            return result

        outputs = [chain("1x1")] if block.one else []
        outputs.append(chain("3x3_reduce", "3x3"))
        outputs.append(chain("double_3x3_reduce", "double_3x3_1", "double_3x3_2"))
        if not block.projection:
            if maps.shape[-1] % 2 or maps.shape[-2] % 2:  # convolutions round up here, pooling down
                raise ValueError(
                    f"bn_inception: the feature map before block {block.name} is {maps.shape[-2]} x {maps.shape[-1]}, "
                    "expected even sides; use images of 224, 227 or 256 pixels"
                )
            outputs.append(halve(maps))
        else:
            pool = nn.functional.avg_pool2d if block.pool == "avg" else nn.functional.max_pool2d
            outputs.append(self._apply_layer(f"{prefix}pool_proj", pool(maps, 3, stride=1, padding=1)))
        return torch.cat(outputs, dim=1)


def branches(block: InceptionBlock, channels: int) -> Iterable[tuple[str, int, int, int]]:
    """Yield name, input channels, output channels and kernel side of a block's convolutions.

    Args:
        block: the block.
        channels: channels of the block's input.
    """
    prefix = f"inception_{block.name}_"
    if block.one:
        yield f"{prefix}1x1", channels, block.one, 1
    yield f"{prefix}3x3_reduce", channels, block.three[0], 1
    yield f"{prefix}3x3", *block.three, 3
    yield f"{prefix}double_3x3_reduce", channels, block.double[0], 1
    yield f"{prefix}double_3x3_1", *block.double, 3
    yield f"{prefix}double_3x3_2", block.double[1], block.double[1], 3
    if block.projection:
        yield f"{prefix}pool_proj", channels, block.projection, 1


def is_strided(name: str) -> bool:
    """Return whether a convolution halves the map: a last 3x3 convolution of a block without a 1x1 branch."""
    return any(name.startswith(f"inception_{block.name}_") for block in BLOCKS if not block.one) and name.endswith(
        ("_3x3", "_3x3_2")
    )


def halve(maps: Tensor) -> Tensor:
    """Apply 3x3 maximum pooling with stride 2; a remaining border row or column gets its own window."""
    return nn.functional.max_pool2d(maps, 3, stride=2, ceil_mode=True)
