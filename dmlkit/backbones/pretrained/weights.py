"""Pretrained weights: from a download with a named fallback, or from a file in any of the usual wrappings."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmlkit.component import Requirement
from dmlkit.errors import UserError
from dmlkit.files.regular import check_regular

WRAPPINGS = ("state_dict", "model_state_dict", "model", "teacher", "student", "network")
"""Keys under which training programs put the weights: Lightning, Proxy-Anchor, DeiT and dmlkit, DINO."""
SUFFIXES = (".pt", ".pth", ".bin", ".tar", ".ckpt", ".safetensors")
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "channels": "rgb", "pixel_max": 1}
CAFFE = {"mean": (104.0, 117.0, 128.0), "std": (1.0, 1.0, 1.0), "channels": "bgr", "pixel_max": 255}


def is_file(weights: str) -> bool:
    """Whether the name of weights is that of a file.

    Example:
        >>> [is_file(name) for name in ("imagenet", "IMAGENET1K_V2", "weights/swav.pth.tar", "model.safetensors")]
        [False, False, True, True]
    """
    return "/" in weights or weights.endswith(SUFFIXES)


def input_requirements(statistics: Mapping[str, Any], reason: str, *, keys: tuple[str, ...] = ()) -> list[Requirement]:
    """What weights ask of the transform: the statistics that they were trained with, or only some of them."""
    return [
        Requirement(f"transform.{key}", (value,), reason)
        for key, value in statistics.items()
        if not keys or key in keys
    ]


def torchvision_requirements(weights: str | None) -> list[Requirement]:
    """ImageNet's statistics for torchvision's own weights; for a file only the order and range of the pixels."""
    if weights is None:
        return []
    if is_file(weights):
        reason = "weights of this network are trained on RGB pixels in 0..1"
        return input_requirements(IMAGENET, reason, keys=("channels", "pixel_max"))
    return input_requirements(IMAGENET, "these weights were trained with ImageNet's statistics (transform: imagenet)")


def build_torchvision(
    build: Callable[..., nn.Module], enum: Any, weights: str | None, head: str, **options: Any
) -> tuple[Any, int]:
    """A torchvision model without its classifier, with weights of its own or from a file.

    Args:
        build: makes the model.
        enum: torchvision's weights of that model.
        weights: ``"imagenet"`` (the best of them), the name of one, the path of a file, or None.
        head: name of the linear classifier; the identity takes its place.
        options: of the model.

    Returns:
        The model, and how many features go into its head.

    Raises:
        UserError: there are no such weights, or they cannot be downloaded or read.
    """
    named = weights if weights is not None and not is_file(weights) else None
    model = build(weights=None, **options) if named is None else _download(build, enum, named, options)
    classifier = model.get_submodule(head)
    assert isinstance(classifier, nn.Linear)
    model.set_submodule(head, nn.Identity())
    if weights is not None and named is None:
        load_weights(model, Path(weights))
    return model, classifier.in_features


def _download(build: Callable[..., nn.Module], enum: Any, weights: str, options: dict[str, Any]) -> nn.Module:
    chosen = named_weights(enum, weights)
    try:
        return build(weights=chosen, **options)
    except (OSError, RuntimeError) as error:  # no network | a download that does not match its hash
        file = Path(torch.hub.get_dir()) / "checkpoints" / chosen.url.rsplit("/", 1)[1]
        raise UserError(
            f"backbone.weights: cannot download {weights} ({error}); get {chosen.url} and put it at {file}, "
            "or give its path as backbone.weights, or set that to null"
        ) from error


def named_weights(enum: Any, weights: str) -> Any:
    """The member of torchvision's weights that a recipe names; ``imagenet`` is the best one.

    Raises:
        UserError: there is none.
    """
    known = list(enum.__members__)
    if weights not in ("imagenet", "DEFAULT", *known):
        raise UserError(
            f"backbone.weights: unknown weights {weights!r}; expected imagenet, one of {', '.join(known)}, or a file"
        )
    return enum.DEFAULT if weights in ("imagenet", "DEFAULT") else enum[weights]


def load_weights(
    model: nn.Module, path: Path, adapt: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
) -> None:
    """Load a file into a model: all tensors of the model must be in it, more may be.

    Accepted are .safetensors and torch files that hold tensors and plain values alone, wrapped as by Lightning,
    Proxy-Anchor, DINO or SwAV: keys in a dictionary under one of `WRAPPINGS`, after any common prefix such as
    ``module.`` or ``backbone.network.``. Missing ``num_batches_tracked`` and batch norms of shape (1, C) are fine.

    Args:
        model: all of it is loaded.
        path: of the file.
        adapt: makes the model's names and shapes of the file's, where they are others.

    Raises:
        UserError: the file is missing, damaged, not safe to load, or does not fit the model.
    """
    expected: dict[str, Tensor] = dict(model.state_dict())
    found = without_prefix(read_tensors(path), expected)
    if adapt is not None:
        found = without_prefix(adapt(found), expected)
    absent = [name for name in expected if name not in found and not name.endswith("num_batches_tracked")]
    if absent:
        raise UserError(
            f"backbone.weights: {path}: lacks {len(absent)} of {len(expected)} tensors of this backbone, first "
            f"{', '.join(absent[:3])}; it is of another network"
        )
    fitted: dict[str, Tensor] = {}
    for name, tensor in expected.items():
        value = found.get(name, tensor)
        # Cadene's BN-Inception has batch norms of shape (1, C)
        value = value.squeeze(0) if value.ndim == tensor.ndim + 1 and len(value) == 1 else value
        if value.shape != tensor.shape:
            raise UserError(
                f"backbone.weights: {path}: {name} has shape {tuple(value.shape)}, this backbone's has "
                f"{tuple(tensor.shape)}; it is of another network"
            )
        fitted[name] = value
    model.load_state_dict(fitted)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The named tensors of a file.

    Raises:
        UserError: see `load_weights`.
    """
    try:
        contents: Any = _read(path)
    except FileNotFoundError:
        raise UserError(
            f"backbone.weights: {path}: no such file; if it has moved, --set backbone.weights=PATH"
        ) from None
    except Exception as error:  # torch and safetensors raise many kinds for damaged and for unsafe files
        raise UserError(
            f"backbone.weights: {path}: cannot read these weights: {str(error).splitlines()[0]}; expected a file of "
            "tensors alone, complete and unencrypted"
        ) from error
    while isinstance(contents, dict):
        inner = next((contents[key] for key in WRAPPINGS if isinstance(contents.get(key), dict)), None)
        if inner is None:
            break
        contents = inner
    named = contents if isinstance(contents, dict) else {}
    tensors = {str(key): value for key, value in named.items() if isinstance(value, Tensor)}
    if not tensors:
        raise UserError(f"backbone.weights: {path}: holds no weights; expected a dictionary of named tensors")
    return tensors


def _read(path: Path) -> Any:
    check_regular(path)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def without_prefix(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the prefix with which most of the expected names are found.

    Example:
        >>> tensors = {"module.conv.weight": torch.zeros(1), "module.head.weight": torch.zeros(1)}
        >>> list(without_prefix(tensors, {"conv.weight": torch.zeros(1)}))
        ['conv.weight', 'head.weight']
    """
    matches: dict[str, int] = {}
    for key in tensors:
        words = key.split(".")
        for depth in range(len(words)):
            if ".".join(words[depth:]) in expected:
                prefix = "".join(f"{word}." for word in words[:depth])
                matches[prefix] = matches.get(prefix, 0) + 1
    best = max(matches, key=lambda prefix: (matches[prefix], -len(prefix)), default="")
    return {key.removeprefix(best): tensor for key, tensor in tensors.items() if key.startswith(best)}
