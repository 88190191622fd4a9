"""Models beside timm's own: a repository of the Hugging Face Hub, or a folder that holds the same two files."""

import json
import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt
from dmlkit.files.regular import read_start

HUB, FOLDER = "hf-hub:", "local-dir:"
SOURCES = (HUB, FOLDER)
CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # as timm writes them, the first preferred
MAX_BYTES = 10_000_000  # of config.json; the names of ImageNet-22k's classes take 2 MB
MAX_ARGUMENT = 16_384  # wider and deeper than any network that is published
OWN = ("num_classes", "in_chans", "img_size")  # arguments that dmlkit gives
FORBIDDEN = ("checkpoint_path", "cache_dir", "features_only")  # of timm.create_model, and no network's


def check_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Let through what an architecture may be told: plain values, none that would open a file.

    Raises:
        ValueError: names the argument.

    Example:
        >>> check_arguments({"reg_tokens": 4, "global_pool": "token"})
        {'reg_tokens': 4, 'global_pool': 'token'}
    """
    for name, value in arguments.items():
        if name in (*OWN, *FORBIDDEN) or name.startswith("pretrained"):
            raise ValueError(f"{excerpt(name)}: dmlkit does not pass this on; leave it out")
        for item in value if isinstance(value, list | tuple) else [value]:
            is_plain = (
                item is None or isinstance(item, str | float) or (isinstance(item, int) and abs(item) <= MAX_ARGUMENT)
            )
            if not is_plain:
                raise ValueError(
                    f"{excerpt(name)}: got {excerpt(repr(value))}, expected text, yes or no, a number of at most "
                    f"{MAX_ARGUMENT:,}, or a list of them"
                )
    return arguments


Arguments = Annotated[dict[str, Any], AfterValidator(check_arguments)]
Triple = tuple[float, float, float]


class InputSettings(BaseModel, frozen=True):
    """``pretrained_cfg`` of a config.json, with timm's names and defaults; other keys of it are of no use here."""

    input_size: tuple[int, Annotated[int, Field(ge=8, le=MAX_ARGUMENT)], int] = (3, 224, 224)
    fixed_input_size: bool | None = None
    interpolation: str = "bicubic"
    crop_pct: Annotated[float, Field(gt=0, le=1)] = 0.875
    crop_mode: str = "center"
    mean: Triple = (0.485, 0.456, 0.406)
    std: Triple = (0.229, 0.224, 0.225)


class ModelFolder(BaseModel, frozen=True):
    """What the config.json of a model says.

    Args:
        architecture: name in timm.
        arguments: of the architecture, beside its size.
        image_size: that the network was built for, pixels; None where it says none.
        settings: how images are prepared.
    """

    architecture: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: Arguments
    image_size: Annotated[int, Field(ge=8, le=MAX_ARGUMENT)] | None
    settings: InputSettings


def read_model(model: str) -> ModelFolder:
    """The config.json of a model that one of `SOURCES` names.

    Raises:
        UserError: it cannot be had, or is none of timm's.
    """
    path = find(model, CONFIG)
    where = f"backbone.model: {path}"
    try:
        content = read_start(path, MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{where}: larger than {MAX_BYTES:,} bytes; expected the config.json of a timm model")
        return _parse(json.loads(content))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{where}: {key}: {first['msg'].removeprefix('Value error, ')}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: cannot read this config.json of a timm model: {error}") from None


def _parse(data: Any) -> ModelFolder:
    if not isinstance(data, Mapping) or "architecture" not in data:
        raise ValueError("it names no architecture")
    settings: Any = data.get("pretrained_cfg", data)  # timm before 0.9 wrote one level
    arguments: Any = data.get("model_args") or {}
    size = None
    if isinstance(arguments, Mapping):
        size = arguments.get("img_size")
        if isinstance(size, list) and size == size[:1] * 2:  # height and width
            size = size[0]
        if arguments.get("in_chans", 3) != 3:
            raise ValueError("the network takes other images than of 3 colours")
        arguments = {name: value for name, value in arguments.items() if name not in OWN}
    plain = {"architecture": data["architecture"], "arguments": arguments, "image_size": size, "settings": settings}
    return ModelFolder.model_validate_json(json.dumps(plain), strict=True)


def weights_file(model: str) -> Path:
    """The weights of a model that one of `SOURCES` names.

    Raises:
        UserError: they cannot be had.
    """
    return find(model, *WEIGHTS)


def find(model: str, *names: str) -> Path:
    """The first of some files that a model has; a repository of the Hub is downloaded file by file, and kept.

    Raises:
        UserError: it has none of them, or the network is missing.
    """
    if model.startswith(FOLDER):
        folder = Path(model.removeprefix(FOLDER))
        for name in names:
            if (folder / name).exists():
                return folder / name
        raise UserError(
            f"backbone.model: {folder}: no {' or '.join(names)} there; expected a folder with {CONFIG} and "
            f"{WEIGHTS[0]}, as timm.models.save_for_hf writes it"
        )
    repository, _, revision = model.removeprefix(HUB).partition("@")
    return _download(repository, revision or None, names)


def _download(repository: str, revision: str | None, names: tuple[str, ...]) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    failure: Exception | None = None
    for name in names:
        try:
            with _without_warnings("huggingface_hub"):  # twelve lines of retries, before ours says it once
                return Path(hf_hub_download(repository, name, revision=revision))
        except LocalEntryNotFoundError as error:  # no network, which is also no entry to this library
            failure = error
            break
        except EntryNotFoundError as error:
            failure = error
        except Exception as error:  # no such repository, one that asks for a licence, no space: many kinds
            failure = error
            break
    reason = str(failure).strip().splitlines()[0] if failure and str(failure).strip() else type(failure).__name__
    raise UserError(
        f"backbone.model: cannot download {' or '.join(names)} of {repository} ({reason}); get {CONFIG} and "
        f"{WEIGHTS[0]} (or {WEIGHTS[1]}) of https://huggingface.co/{repository} on a machine with network, put both "
        f"into a folder and name it {FOLDER}FOLDER"
    ) from failure


@contextmanager
def _without_warnings(library: str) -> Generator[None]:
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
