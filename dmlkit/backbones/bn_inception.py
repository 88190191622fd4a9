"""BN-Inception: GoogLeNet with batch norm, the backbone of most published metric-learning results."""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone
from dmlkit.backbones.weights import CAFFE, input_requirements, is_file, load_weights
from dmlkit.component import Requirement
from dmlkit.errors import OptionError
from dmlkit.pooling import Avg, Pooling

URL = "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth"


class InceptionBlock(NamedTuple):
    """Channels of an inception block; a block without ``one`` halves the sides of the map."""

    name: str
    one: int  # channels of the 1x1 branch; 0 for no such branch
    three: tuple[int, int]  # channels of the 3x3 branch before and after its 3x3 convolution
    double: tuple[int, int]  # channels of the branch with two 3x3 convolutions before and after them
    pool: Literal["avg", "max"]  # pooling that the last branch starts with
    projection: int  # channels of the last branch; 0 if the branch only pools


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


class Layer(NamedTuple):
    """A convolution with its batch norm: its name, channels before and after, side of its kernel, and stride."""

    name: str
    before: int
    after: int
    side: int = 1
    stride: int = 1


def branches(block: InceptionBlock, channels: int) -> list[list[Layer]]:
    """Return the layers of each branch of a block with an input of ``channels`` channels."""
    prefix, stride = f"inception_{block.name}_", 1 if block.one else 2
    first, last = block.double
    branches = [
        [Layer(f"{prefix}1x1", channels, block.one)],
        [Layer(f"{prefix}3x3_reduce", channels, block.three[0]), Layer(f"{prefix}3x3", *block.three, 3, stride)],
        [
            Layer(f"{prefix}double_3x3_reduce", channels, first),
            Layer(f"{prefix}double_3x3_1", first, last, 3),
            Layer(f"{prefix}double_3x3_2", last, last, 3, stride),
        ],
        [Layer(f"{prefix}pool_proj", channels, block.projection)],
    ]
    return [branch for branch in branches if branch[-1].after]


class BNInception(Backbone, name="bn_inception"):
    """BN-Inception (Ioffe & Szegedy 2015), 1 024 features; use it with the transform ``bn_inception``.

    The network of figure 5 (ICML, arXiv:1502.03167) up to its pooling. Download its published weights,
    ``bn_inception-52deb4733.pth``, from data.lip6.fr/cadene. Layers have the names of the published Caffe and PyTorch
    weights: ``inception_3a_3x3_reduce`` is a convolution with a bias, ``inception_3a_3x3_reduce_bn`` the batch norm
    that follows, and a ReLU follows both.

    Raises:
        UserError: the file is missing or belongs to another network.
        ValueError: raised by `forward` if a map cannot be halved; images of 224, 227 and 256 pixels work.
    """

    num_features = 1024
    weights: str | None = None
    """Path of a weights file; null trains from scratch."""
    pooling: Pooling = Avg.Config()
    """Pooling of the last feature map to one vector."""
    batchnorm_momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Weight of a new batch in the running statistics; Proxy-Anchor's code has 0.9, ProxyGML's and SoftTriple's 0.1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        pooling = self.take_pooling()
        self.layers = nn.ModuleDict()
        layers = [Layer("conv1_7x7_s2", 3, 64, 7, 2), Layer("conv2_3x3_reduce", 64, 64), Layer("conv2_3x3", 64, 192, 3)]
        channels = 192
        for block in BLOCKS:
            made = branches(block, channels)
            layers += chain(*made)
            channels = sum(branch[-1].after for branch in made) + (0 if block.projection else channels)
        for name, before, after, side, stride in layers:
            self.layers[name] = nn.Conv2d(before, after, side, stride=stride, padding=side // 2)
            self.layers[f"{name}_bn"] = nn.BatchNorm2d(after, momentum=self.batchnorm_momentum)
        self.check_weights()
        if self.weights is not None:
            load_weights(self.layers, Path(self.weights))
        self.pooling = pooling

    def check_weights(self) -> None:
        if self.weights is not None and not is_file(self.weights):
            raise OptionError("backbone.weights", f"{self.weights!r}: expected a file, e.g. the download of {URL}")

    def requirements(self) -> Iterable[Requirement]:
        if self.weights is None:
            return []
        return input_requirements(CAFFE, "these weights take BGR pixels in 0..255 (transform: bn_inception)")

    def _through(self, maps: Tensor, *names: str) -> Tensor:
        for name in names:
            maps = torch.relu(self.layers[f"{name}_bn"](self.layers[name](maps)))
        return maps

    def blocks(self) -> list[nn.Module]:
        prefixes = [f"inception_{block.name}_" for block in BLOCKS]
        layers = list(self.layers.items())
        return [nn.ModuleList([layer for name, layer in layers if name.startswith(start)]) for start in prefixes]

    def forward(self, images: Tensor) -> Tensor:
        maps = halve(self._through(images, "conv1_7x7_s2"))
        maps = halve(self._through(maps, "conv2_3x3_reduce", "conv2_3x3"))
        for block in BLOCKS:
            maps = self._inception(block, maps)
        return self.pooling(maps)

    def _inception(self, block: InceptionBlock, maps: Tensor) -> Tensor:
        height, width = maps.shape[-2:]
        if not block.projection and (height % 2 or width % 2):  # convolutions round up here, pooling down
            raise ValueError(
                f"bn_inception: the feature map before block {block.name} is {height} x {width}, expected even sides; "
                "use images of 224, 227 or 256 pixels"
            )
        pool = nn.functional.avg_pool2d if block.pool == "avg" else nn.functional.max_pool2d
        outputs: list[Tensor] = []
        for branch in branches(block, maps.shape[1]):
            names = [layer.name for layer in branch]
            start = pool(maps, 3, stride=1, padding=1) if names[0].endswith("pool_proj") else maps
            outputs.append(self._through(start, *names))
        return torch.cat(outputs if block.projection else [*outputs, halve(maps)], dim=1)


def halve(maps: Tensor) -> Tensor:
    """Apply 3x3 maximum pooling with stride 2; a remaining border row or column gets its own window."""
    return nn.functional.max_pool2d(maps, 3, stride=2, ceil_mode=True)
