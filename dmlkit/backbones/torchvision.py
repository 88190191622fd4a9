"""What the networks of torchvision have in common: their weights, and how images are prepared for these."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from dmlkit.backbones.base import BackboneConfig
from dmlkit.backbones.pretrained.weights import IMAGENET, PublishedInput, input_requirements, is_file, load_weights
from dmlkit.component import Requirement, one_of
from dmlkit.errors import OptionError
from dmlkit.pooling import Avg, PoolingConfig


class TorchvisionConfig(BackboneConfig, frozen=True, abstract=True):
    """Base of the configurations of torchvision's networks."""

    weights: str | None = None
    """``imagenet``, a name of torchvision weights, or the path of a file; null trains from scratch."""
    pooling: Annotated[PoolingConfig, one_of] = Avg.Config()
    """Pooling of the last feature map to one vector."""

    @property
    def network(self) -> str:
        """Name of the network in ``torchvision.models``."""
        return self.name

    def requirements(self) -> Iterable[Requirement]:
        """Return requirements on the transform: ImageNet's statistics for named weights, channels for a file."""
        if self.weights is None:
            return []
        if is_file(self.weights):
            reason = "weights of this network were trained on RGB pixels in 0..1"
            return input_requirements(IMAGENET, reason, keys=("channels", "pixel_max"))
        reason = "these weights were trained with ImageNet's statistics (transform: imagenet)"
        return input_requirements(IMAGENET, reason)

    def check_weights(self) -> None:
        if self.weights is not None and not is_file(self.weights):
            named_weights(self.network, self.weights)

    def published_input(self) -> PublishedInput:
        if self.weights is None or is_file(self.weights):
            found = "null" if self.weights is None else "a file, whose preprocessing is unknown"
            raise OptionError(
                "transform.name",
                "pretrained uses the preprocessing published with the weights, but backbone.weights is "
                f"{found}; use another transform, e.g. imagenet",
            )
        preset: Any = named_weights(self.network, self.weights).transforms()
        (crop,), (resize,) = preset.crop_size, preset.resize_size
        interpolation = preset.interpolation.value
        return PublishedInput(crop, crop / resize, False, interpolation, tuple(preset.mean), tuple(preset.std))


def build_torchvision(network: str, weights: str | None, head: str, **options: Any) -> tuple[Any, int]:
    """Build a torchvision model without its classifier, with torchvision's weights or those of a file.

    Args:
        network: name of the model in ``torchvision.models``.
        weights: ``"imagenet"`` (torchvision's best), the name of one of them, the path of a file, or None.
        head: name of the linear classifier, which the identity replaces.
        options: further arguments of the model.

    Returns:
        The model and the number of features that enter its head.

    Raises:
        UserError: the weights are unknown or cannot be downloaded or read.
    """
    from torchvision import models

    build = getattr(models, network)
    named = weights if weights is not None and not is_file(weights) else None
    model = build(weights=None, **options) if named is None else _download(build, network, named, options)
    classifier = model.get_submodule(head)
    assert isinstance(classifier, nn.Linear)
    model.set_submodule(head, nn.Identity())
    if weights is not None and named is None:
        load_weights(model, Path(weights))
    return model, classifier.in_features


def _download(build: Any, network: str, weights: str, options: dict[str, Any]) -> nn.Module:
    chosen = named_weights(network, weights)
    try:
        return build(weights=chosen, **options)
    except (OSError, RuntimeError) as error:  # no network | a download that does not match its hash
        file = Path(torch.hub.get_dir()) / "checkpoints" / chosen.url.rsplit("/", 1)[1]
        raise OptionError(
            "backbone.weights",
            f"cannot download {weights} ({error}); download {chosen.url} to {file}, "
            "or set backbone.weights to the path of the file, or to null",
        ) from error


def named_weights(network: str, weights: str) -> Any:
    """Return the member of torchvision's weights that a recipe names; ``imagenet`` is the best one.

    Raises:
        UserError: the name is unknown.
    """
    from torchvision.models import get_model_weights

    enum: Any = get_model_weights(network)
    known = list(enum.__members__)
    if weights not in ("imagenet", "DEFAULT", *known):
        near = get_close_matches(weights, ["imagenet", *known], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected imagenet, one of {', '.join(known)}, or a file"
        raise OptionError("backbone.weights", f"unknown weights {weights!r}; {hint}")
    return enum.DEFAULT if weights in ("imagenet", "DEFAULT") else enum[weights]
