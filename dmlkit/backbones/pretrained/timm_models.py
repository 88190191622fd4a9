"""timm as a builder of networks: what it has, what its weights want, and what it objects to."""

import sys
from typing import Any

from torch import Tensor, nn

from dmlkit.backbones.pretrained import efficientnet_lite
from dmlkit.backbones.pretrained.model_folder import SOURCES, ModelFolder
from dmlkit.errors import UserError


def registered_settings(model: str) -> Any:
    """timm's settings of a model's weights; None without timm or without such a model, which `Timm` reports."""
    if model.startswith(SOURCES):
        return None
    try:
        import timm

        return timm.get_pretrained_cfg(model)
    except (ImportError, RuntimeError):
        return None


def built_size(folder: ModelFolder) -> int | None:
    """The side of the images that a folder's network was built for, pixels; None where it takes any."""
    check_registered(folder.architecture)
    in_timm = registered_settings(folder.architecture)
    stated = folder.settings.fixed_input_size
    is_fixed = (in_timm is not None and in_timm.fixed_input_size) if stated is None else stated
    return folder.image_size or (folder.settings.input_size[-1] if is_fixed else None)


def adapt(network: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a file with a network's names, and positions interpolated to its size.

    Every module of timm has the function that does so for its own downloads. What it cannot read it leaves as it is,
    and `load_weights` tells what is missing.
    """
    tensors = efficientnet_lite.timm_names(tensors, network.state_dict())
    function = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
    try:
        return function(dict(tensors), network) if function else tensors
    except (LookupError, ValueError, RuntimeError, AttributeError, TypeError, AssertionError):  # of another network
        return tensors


def check_registered(model: str) -> None:
    """Make sure that timm is there and has a model.

    Raises:
        UserError: it is not, or has not.
    """
    try:
        import timm
    except ImportError:
        raise UserError("backbone.name: timm is not installed; install it with: pip install 'dmlkit[timm]'") from None
    if not timm.is_model(model):
        near = timm.list_models(f"*{model.split('.')[0]}*")[:3]
        hint = f"did you mean {', '.join(near)}?" if near else "see timm.list_models()"
        raise UserError(f"backbone.model: timm has no {model!r}; {hint}")


def create(model: str, *, pretrained: bool, **options: Any) -> Any:
    """timm's model without its classifier; ``options`` are those of the architecture.

    Raises:
        UserError: timm is missing or has no such model, or the weights cannot be downloaded.
        ValueError: the model takes no such options.
    """
    check_registered(model)
    import timm

    try:
        return timm.create_model(model, pretrained=pretrained, num_classes=0, **options)
    except (AssertionError, TypeError, ZeroDivisionError) as error:  # timm asks for little, and asserts it
        told = ", ".join(f"{name} {value}" for name, value in options.items())
        raise ValueError(f"{model} cannot be built with {told}: {error or type(error).__name__}") from error
    except (OSError, RuntimeError, ValueError) as error:  # no network | an unknown tag | a damaged download
        if not pretrained:
            raise
        in_timm = timm.get_pretrained_cfg(model, allow_unregistered=True)
        source = f"model.safetensors of https://huggingface.co/{in_timm.hf_hub_id}" if in_timm else "its weights"
        raise UserError(
            f"backbone.weights: cannot download {model} ({str(error).splitlines()[0]}); get {source} on a machine with "
            "network and give the file's path as backbone.weights, or set that to null"
        ) from error
