"""Low-rank updates of a run as an adapter that peft loads onto the network of timm or torchvision.

peft is not needed to write it: `adapter_config.json` is a few settings, and the tensors have peft's names.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dmlkit.backbones.base import Backbone, BackboneConfig
from dmlkit.backbones.pretrained.timm_models import FOLDER, HUB
from dmlkit.backbones.timm import TimmConfig
from dmlkit.backbones.torchvision import TorchvisionConfig
from dmlkit.backbones.tuning import LoRAConfig, LowRankUpdate
from dmlkit.files.atomic import json_text, write_text

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OUTSIDE = "base_model.model."  # before the names of a network in peft's files
OUTPUT = ".out_proj"  # of torch's attention


def write_adapter(config: BackboneConfig, backbone: Backbone, folder: Path) -> str:
    """Write the low-rank updates of a backbone into a folder, and return why not if that is not possible.

    A layer whose output is not a sum of its own and that of the update, as peft computes it, is stored whole: a
    convolution with groups or dilation, torch's attention, and other classes.

    Args:
        config: the backbone of the run, whose tuning is `LoRAConfig`.
        backbone: the network with its updates, not merged.
        folder: the folder.

    Returns:
        The reason why there is no adapter; empty if it is written.
    """
    if not isinstance(config, TimmConfig | TorchvisionConfig):
        return f"peft adapts networks of timm and torchvision; this backbone is {config.name}"
    if config.weights is None:
        return "the backbone has no pretrained weights to which the updates could be added"
    assert isinstance(config.tuning, LoRAConfig)
    network = backbone.get_submodule("network")
    low_rank, whole, tensors = _tensors(network)
    others = [name for name, _ in network.named_modules() if name not in whole and name.endswith(tuple(whole))]
    if others:  # peft looks for the end of the name
        return f"peft would also replace {others[0]}"
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": base_name(config),
        "inference_mode": True,
        "r": config.tuning.rank,
        "lora_alpha": config.tuning.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": "|".join(map(re.escape, low_rank)) or None,  # a text is a pattern of the whole name
        "modules_to_save": whole or None,
    }
    write_text(folder / ADAPTER_CONFIG, json_text(settings))
    save_file({f"{OUTSIDE}{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / ADAPTER_WEIGHTS)
    return ""


def base_name(config: TimmConfig | TorchvisionConfig) -> str:
    """Return the name of the network to which an adapter belongs, e.g. ``timm/resnet18.a1_in1k``."""
    if isinstance(config, TorchvisionConfig):
        return f"torchvision/{config.network}"
    if config.model.startswith(FOLDER):
        return Path(config.model.removeprefix(FOLDER)).name
    return config.model.removeprefix(HUB) if config.model.startswith(HUB) else f"timm/{config.model}"


@torch.no_grad()
def _tensors(network: nn.Module) -> tuple[list[str], list[str], dict[str, Tensor]]:
    """Return the names of modules with updates, of modules to store whole, and the tensors under peft's names."""
    low_rank, whole, tensors = list[str](), list[str](), dict[str, Tensor]()
    for name, module, update in _updated(network):
        owner = name.removesuffix(OUTPUT)  # torch's attention reads the weights of this layer itself
        attention = network.get_submodule(owner)
        if isinstance(attention, nn.MultiheadAttention):
            # peft 0.21 adapts it too, but adds the update of its last layer twice: huggingface/peft#3774
            name, module = owner, attention
        if _is_additive(module):
            low_rank.append(name)
            tensors |= _low_rank(name, module, update.down, update.up)
        elif name not in whole:
            whole.append(name)
            tensors |= {f"{name}.{key}": value for key, value in _merged_parameters(module)}
    if not low_rank:  # peft refuses an adapter without one: here is one that adds 0
        name, module = next(
            (name, module)
            for name, module in network.named_modules()
            if _is_additive(module) and not name.startswith(tuple(whole))
        )
        rank = len(next(_updated(network))[2].down)
        rows, columns = module.get_parameter("weight").flatten(1).shape
        low_rank.append(name)
        tensors |= _low_rank(name, module, torch.zeros(rank, columns), torch.zeros(rows, rank))
    return low_rank, whole, tensors


def _low_rank(name: str, module: nn.Module, down: Tensor, up: Tensor) -> dict[str, Tensor]:
    """Return the factors A and B of an update under peft's names, in the form of a layer's weights."""
    sides: tuple[int, ...] = getattr(module, "kernel_size", ())
    return {
        f"{name}.lora_A.weight": down.view(len(down), -1, *sides),
        f"{name}.lora_B.weight": up.view(*up.shape, *(1 for _ in sides)),
    }


def _updated(network: nn.Module) -> Iterator[tuple[str, nn.Module, LowRankUpdate]]:
    """Yield the name of a module, the module, and its low-rank update."""
    for name, module in list(network.named_modules()):
        for found in dict(getattr(module, "parametrizations", {})).values():
            if isinstance(found[0], LowRankUpdate):
                yield name, module, found[0]


def _merged_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of parameters with their updates; merging a copy would change the class of both."""
    for name, part in module.named_modules():
        if "parametrizations" not in name:
            updated = dict(getattr(part, "parametrizations", {}))
            for key in (*updated, *dict(part.named_parameters(recurse=False))):
                yield f"{name}.{key}" if name else key, getattr(part, key)


def _is_additive(module: nn.Module) -> bool:
    """Return whether a layer with W + BA gives the sum of its outputs with W and with BA, as peft computes them."""
    kind = parametrize.type_before_parametrizations(module)
    if kind is nn.Conv2d:
        return (module.groups, module.dilation, module.padding_mode) == (1, (1, 1), "zeros")
    return kind is nn.Linear
