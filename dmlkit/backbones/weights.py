"""Loading of pretrained weights, from a download or from a file with one of the usual layouts."""

import re
from collections.abc import Callable, Mapping
from math import floor
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dmlkit.component import Requirement
from dmlkit.errors import OptionError, first_line
from dmlkit.files.regular import check_regular, what_instead

WRAPPINGS = ("state_dict", "model_state_dict", "model", "teacher", "student", "network")
"""Keys under which training programs store the weights: Lightning, Proxy-Anchor, DeiT and dmlkit, DINO."""
SUFFIXES = (".pt", ".pth", ".bin", ".tar", ".ckpt", ".safetensors")
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "channels": "rgb", "pixel_max": 1}
CAFFE = {"mean": (104.0, 117.0, 128.0), "std": (1.0, 1.0, 1.0), "channels": "bgr", "pixel_max": 255}


def is_file(weights: str) -> bool:
    """Return whether ``weights`` is the path of a file and not a name."""
    return "/" in weights or weights.endswith(SUFFIXES)


def input_requirements(statistics: Mapping[str, Any], reason: str) -> list[Requirement]:
    """Return the requirements of weights on the transform, the ``statistics`` of their training."""
    return [Requirement(f"transform.{key}", (value,), reason) for key, value in statistics.items()]


def file_requirements() -> list[Requirement]:
    """Return the requirements of a file of weights, whose mean and standard deviation are not known."""
    statistics = {"channels": "rgb", "pixel_max": 1}
    return input_requirements(statistics, "weights of this network were trained on RGB pixels in 0..1")


def one_size(size: int, reason: str) -> list[Requirement]:
    """Return the requirements of a network that takes only images of one size."""
    sizes = {"transform.size": (size,), "transform.training_size": (None, size)}
    return [Requirement(key, allowed, reason) for key, allowed in sizes.items()]


def load_weights(
    model: nn.Module, path: Path, adapt: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
) -> None:
    """Load a file into a model. All tensors of the model must be in the file; others are ignored.

    The file is a .safetensors or torch file with only tensors and plain values, as Lightning, Proxy-Anchor, DINO or
    SwAV write it: tensors may be in a dictionary under one of `WRAPPINGS` and share a prefix such as ``module.`` or
    ``backbone.network.``; ``adapt`` converts other names and shapes to the model's. Missing ``num_batches_tracked`` and
    batch norms of shape (1, C) are accepted.
    """
    expected: dict[str, Tensor] = dict(model.state_dict())
    tensors = without_prefix(read_tensors(path), expected)
    if adapt is not None:
        tensors = without_prefix(adapt(tensors), expected)
    absent = [name for name in expected if name not in tensors and not name.endswith("num_batches_tracked")]
    if absent:
        raise OptionError(
            "backbone.weights",
            f"{path} lacks {len(absent)} of {len(expected)} tensors of this backbone, the first "
            f"being {', '.join(absent[:3])}; use weights of the same network",
        )
    fitted: dict[str, Tensor] = {}
    for name, tensor in expected.items():
        value = tensors.get(name, tensor)
        # Cadene's BN-Inception has batch norms of shape (1, C)
        value = value.squeeze(0) if value.ndim == tensor.ndim + 1 and len(value) == 1 else value
        if value.shape != tensor.shape:
            raise OptionError(
                "backbone.weights",
                f"{path}: {name} has shape {tuple(value.shape)}, expected {tuple(tensor.shape)}; "
                "use weights of the same network",
            )
        fitted[name] = value
    model.load_state_dict(fitted)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the named tensors of a file, as `load_weights` takes it."""
    try:
        contents: Any = _read(path)
    except FileNotFoundError:
        moved = "if it has moved, use --set backbone.weights=PATH"
        raise OptionError("backbone.weights", f"{path}: no such file; {moved}") from None
    except Exception as error:  # torch and safetensors raise many kinds for damaged and for unsafe files
        reason = first_line(error)
        if isinstance(error, UnpicklingError):  # torch's own words advise to run the code of a pickle
            other = re.search(r"GLOBAL (\S+)", str(error))
            reason = f"it holds objects of {other[1]}" if other else "it is no file of PyTorch"
        raise OptionError(
            "backbone.weights",
            f"{path}: cannot read these weights: {what_instead(path, reason)}; expected a complete, "
            "unencrypted file that holds only tensors and plain values",
        ) from error
    while isinstance(contents, dict):
        inner = next((contents[key] for key in WRAPPINGS if isinstance(contents.get(key), dict)), None)
        if inner is None:
            break
        contents = inner
    named = contents if isinstance(contents, dict) else {}
    tensors = {str(key): value for key, value in named.items() if isinstance(value, Tensor)}
    if not tensors:
        raise OptionError("backbone.weights", f"{path} contains no weights; expected a dictionary of named tensors")
    return tensors


def _read(path: Path) -> Any:
    check_regular(path)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def without_prefix(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without their common prefix: the one under which most expected names are found."""
    matches: dict[str, int] = {}
    for key in tensors:
        words = key.split(".")
        for depth in range(len(words)):
            if ".".join(words[depth:]) in expected:
                prefix = "".join(f"{word}." for word in words[:depth])
                matches[prefix] = matches.get(prefix, 0) + 1
    best = max(matches, key=lambda prefix: (matches[prefix], -len(prefix)), default="")
    return {key.removeprefix(best): tensor for key, tensor in tensors.items() if key.startswith(best)}


UNKNOWN = "unknown"
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")  # an identifier of the Hub
FREE = ("apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0")
"""Licenses that allow every use."""


def license_words(name: str) -> str:
    """Return a license of weights in words.

    Example:
        >>> license_words("mit"), license_words("cc-by-nc-4.0"), license_words("unknown")
        ('license mit', 'license cc-by-nc-4.0, which does not allow every use', 'license unknown')
    """
    limits = ", which does not allow every use" if name not in (*FREE, UNKNOWN) else ""
    return f"license {name}{limits}"


class PublishedInput(NamedTuple):
    """Evaluation preprocessing of published weights."""

    size: int
    crop: float  # side of the input divided by the side of the resized image that it is cropped from
    square: bool  # whether the image is squeezed to a square before the crop; otherwise its aspect ratio is kept
    interpolation: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def keys(self, size: int | None = None) -> dict[str, Any]:
        """Return the keys of a transform; another ``size`` than the published one keeps the crop's proportion."""
        side = size or self.size
        resize = floor(side / self.crop + 1e-6)  # 235 / 0.94 is 249.99999999999997
        shape = {"size": side, "resize": resize, "square": self.square, "interpolation": self.interpolation}
        return {**shape, "mean": list(self.mean), "std": list(self.std)}
