"""Networks built by timm: their registered settings, weights and errors."""

import sys
from typing import Any

from torch import Tensor, nn

from dmlkit.backbones.pretrained import efficientnet_lite
from dmlkit.backbones.pretrained.model_folder import SOURCES, ModelFolder
from dmlkit.errors import UserError


def registered_settings(model: str) -> Any:
    """Return timm's settings of a model's weights; None if timm or the model is missing, which `Timm` reports."""
    if model.startswith(SOURCES):
        return None
    try:
        import timm

        return timm.get_pretrained_cfg(model)
    except (ImportError, RuntimeError):
        return None


def built_size(folder: ModelFolder) -> int | None:
    """Return the side in pixels of the images that a folder's network was built for; None if it takes any size."""
    check_registered(folder.architecture)
    in_timm = registered_settings(folder.architecture)
    stated = folder.settings.fixed_input_size
    is_fixed = (in_timm is not None and in_timm.fixed_input_size) if stated is None else stated
    return folder.image_size or (folder.settings.input_size[-1] if is_fixed else None)


def adapt(network: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's tensors under a network's names, with position embeddings interpolated to its size.

    It calls the function with which timm's own module converts its downloads. If that function fails, the tensors are
    returned unconverted, and `load_weights` reports what is missing.
    """
    tensors = efficientnet_lite.timm_names(tensors, network.state_dict())
    function = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
    try:
        return function(dict(tensors), network) if function else tensors
    except (LookupError, ValueError, RuntimeError, AttributeError, TypeError, AssertionError):  # of another network
        return tensors


def check_registered(model: str) -> None:
    """Check that timm is installed and has a model.

    Raises:
        UserError: timm is not installed or has no such model.
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
    """Build a timm model without its classifier; ``options`` are arguments of the architecture.

    Raises:
        UserError: timm is missing or has no such model, or the weights cannot be downloaded.
        ValueError: the architecture does not accept these options.
    """
    check_registered(model)
    import timm

    try:
        return timm.create_model(model, pretrained=pretrained, num_classes=0, **options)
    except (AssertionError, TypeError, ZeroDivisionError) as error:  # timm checks few options, with assertions
        given = ", ".join(f"{name} {value}" for name, value in options.items())
        raise ValueError(f"{model} cannot be built with {given}: {error or type(error).__name__}") from error
    except (OSError, RuntimeError, ValueError) as error:  # no network | an unknown tag | a damaged download
        if not pretrained:
            raise
        in_timm = timm.get_pretrained_cfg(model, allow_unregistered=True)
        source = f"model.safetensors of https://huggingface.co/{in_timm.hf_hub_id}" if in_timm else "its weights"
        raise UserError(
            f"backbone.weights: cannot download {model} ({str(error).splitlines()[0]}); download {source} on a machine "
            "with network access and set backbone.weights to the file's path, or to null"
        ) from error
