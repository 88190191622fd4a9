"""The one place that looks at what a path is, by the files that dmlkit writes, and which options go with it.

It imports no torch, so that the command line refuses a wrong path at once.
"""

import json
import os
from collections.abc import Container, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from dmlkit.errors import OptionError, UserError
from dmlkit.files.escape import command_word
from dmlkit.files.outputs import EMBEDDING_FILES, GALLERY_MARK, RUN_MARKS
from dmlkit.files.regular import EXTENSIONS, TABLES, is_video, read_start

STUDY_MARK, REVIEW_MARK = "study.json", "review.json"
CREATING_MARK = "creating.json"
"""File of a gallery whose creation is not complete, and start of the folders of images that are not yet added."""
Kind = Literal["run", "embeddings", "gallery", "array", "images", "backbone"]
NAMES: dict[Kind, str] = {
    "run": "a run",
    "embeddings": "a folder of embeddings",
    "gallery": "a gallery",
    "array": "a file of vectors",
    "images": "an image or a folder of images",
    "backbone": "a backbone before training",
}
WRITTEN: dict[Kind, tuple[str, ...]] = {
    "run": RUN_MARKS,
    "embeddings": EMBEDDING_FILES,
    "gallery": (GALLERY_MARK, "versions"),
}
"""Files of a folder that dmlkit wrote; a dataset may have one of them, such as a ``gallery.json`` of its own."""
MOST_BYTES = 10_000_000  # size of config.json; the names of ImageNet-22k's classes take 2 MB
MOST_SIBLINGS = 10_000  # names among which a similar one is looked for
MODEL, FOLDER = "timm:", "local-dir:"
"""Start of the name of a pretrained model, which is a run without training; and of one that is in a folder."""
MODEL_CONFIG = "config.json"
IN_TIMM = {
    ("dinov2", 14): "vit_{size}_patch14_dinov2.lvd142m",
    ("dinov2_with_registers", 14): "vit_{size}_patch14_reg4_dinov2.lvd142m",
    ("dinov3_vit", 16): "vit_{size}_patch16_dinov3.lvd1689m",
    ("clip", 14): "vit_{size}_patch14_clip_{image_size}.openai",
    ("clip", 16): "vit_{size}_patch16_clip_224.openai",
    ("clip", 32): "vit_{size}_patch32_clip_224.openai",
    ("siglip", 16): "vit_{size}_patch16_siglip_{image_size}.webli",
}
"""Names in timm of models of transformers, by their type and the side of a patch."""
SIZES = {384: "small", 768: "base", 1024: "large"}  # by width
LOCAL = "local"  # instead of a second run: the patches of the first one
NO_CLASSES = "no class folders; expected at least two for training and two for testing"
MOVED = "if it has moved, use --set dataset."
NO_IMAGES = "images of a pretrained model"
"""Name of the folder of images in the recipe of a pretrained model, which has none."""
NO_CLASS_FOLDERS = f"no such folder; expected one subfolder of images per class; {MOVED}root=PATH"
FLIP, SCALES = "flip", "scales"  # instead of a second run: the mean with copies of each image
PARTNERS = {
    Path(LOCAL): "eval, verify and gallery create take patches, which a gallery then compares by itself",
    Path(FLIP): "eval compares means with mirror images",
    Path(SCALES): "eval compares means with images of other sizes",
}
"""What takes each of them."""
EXPECTED_DATA = "a folder with one subfolder per class, a table or annotations (see docs/data.md), or a recipe (.yaml)"
EXPECTED = "a run, a folder of embeddings, a gallery or a file of vectors"
APPLIES: dict[str, tuple[Kind, ...]] = {  # kinds of source to which each option applies
    "--split": ("run", "backbone"),
    "--checkpoint": ("run",),
    "--set": ("run", "backbone"),
    "--evidence": ("run",),
    "--with": ("run", "gallery"),
    "--device": ("run", "images", "backbone"),
    "--run": ("images",),
    "--boxes": ("images",),
    "--box-margin": ("images",),
    "--box-confidence": ("images",),
    "--column": ("images",),
    "--root": ("images",),
    "--labels": ("array",),
    "--manifold": ("array",),
    "--where": ("run", "embeddings", "gallery", "array", "backbone"),
    "--far": ("run",),
    "--fpir": ("gallery",),
    "--strangers": ("gallery",),
    "--near": ("gallery",),
    "--by": ("run", "embeddings", "gallery"),
    "--rerank": ("run", "embeddings", "gallery", "array"),
    "--form": ("run", "embeddings", "gallery", "array"),
}
OTHER = {"--far": "--fpir", "--fpir": "--far"}  # the option that asks the same of another kind of source


def kind_of(path: Path, expected: str = EXPECTED) -> Kind:
    """Return what a path is, by the files that dmlkit writes."""
    if path.is_file():
        from dmlkit.files.vector_file import holds_vectors  # it imports what this module is imported by

        return "array" if holds_vectors(path) else "images"
    if model_name(path) is not None:
        return "run"
    require_path(path, expected)
    if any((path / name).exists() for name in (GALLERY_MARK, CREATING_MARK)):
        return "gallery"
    if any((path / name).exists() for name in ("manifest.json", "embeddings.npy")):
        return "embeddings"
    return "run" if any((path / name).exists() for name in RUN_MARKS) else "images"


def model_name(path: Path) -> str | None:
    """Return the name of the pretrained model that a path stands for, or None.

    It is ``timm:NAME``, unless there is a file or folder of this name, or a folder that ``timm.models.save_for_hf``
    wrote, whose name is then ``timm:local-dir:FOLDER``.

    Example:
        >>> model_name(Path("timm:resnet18")), model_name(Path("runs/birds"))
        ('timm:resnet18', None)
    """
    text = str(path)
    if text.startswith(MODEL) and not path.exists():
        folder = text.removeprefix(f"{MODEL}{FOLDER}")
        return text if folder == text else f"{MODEL}{FOLDER}{Path(folder).absolute()}"
    if "architecture" not in _config(path):
        return None
    return f"{MODEL}{FOLDER}{path.absolute()}"


def place_of_run(path: Path) -> Path:
    """Return the absolute path of a run, or the name of a pretrained model."""
    return Path(model_name(path) or path.resolve())


def refuse_other_models(path: Path) -> None:
    """Raise a `UserError` for a folder of transformers or sentence-transformers, with the same model of timm."""
    if not path.is_dir():  # globbing a name with a null byte is a ValueError since Python 3.13
        return
    config, program = _config(next(path.glob("0_*"), path)), "transformers"
    if (path / "modules.json").is_file():
        program = "sentence-transformers"
    elif "model_type" not in config:
        return
    kind, vision = str(config.get("model_type", "")), config.get("vision_config")
    config |= vision if isinstance(vision, dict) else {}
    size, image_size = SIZES.get(config.get("hidden_size", 0)), config.get("image_size", 224)
    name = IN_TIMM.get((kind, config.get("patch_size", 0))) if size else None
    same = f"timm:{name.format(size=size, image_size=image_size)} has its weights" if name else "use timm:NAME"
    raise UserError(f"{path}: is a folder of {program}{kind and f' ({kind})'}, which dmlkit does not read; {same}")


def _config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json in a folder; nothing if there are none."""
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads(read_start(folder / MODEL_CONFIG, MOST_BYTES))
        return config if isinstance(config, dict) else {}
    return {}


def require_source(path: Path) -> Kind:
    """Return what a path is: a run, embeddings, a gallery or an array."""
    kind = kind_of(path)
    if kind == "images" and path.is_file() and path.suffix.lower() in TABLES and path.suffix.lower() != ".json":
        return "array"  # with paths too, or without vectors, which is reported when it is read
    if kind == "images":
        refuse_other_models(path)
        raise UserError(f"{path}: expected {EXPECTED}; embed images with dmlkit embed first")
    if kind == "run":
        require_run(path)
    if kind == "gallery":
        require_gallery(path)
    return kind


def require_queries(path: Path) -> Kind:
    """Return what a path is: images to search with, or whatever `require_source` returns."""
    kind = kind_of(path, f"an image, a folder of images, {EXPECTED}")
    if kind == "images" and not is_video(path):
        require_some_images(path)
    return kind


def require_path(path: Path, expected: str) -> None:
    """Raise a `UserError` unless a path exists; it has the most similar name that does, or what was ``expected``."""
    if path.exists():
        return
    refuse_address(path)
    missing = next((candidate for candidate in (*reversed(path.parents), path) if not candidate.exists()), path)
    names: dict[str, str] = {}
    with suppress(OSError):  # the parent is a file, or cannot be read
        others = (entry.name for entry in islice(missing.parent.iterdir(), MOST_SIBLINGS))
        names = {name.lower(): name for name in others if name != missing.name}  # another process may just create it
    matches = get_close_matches(missing.name.lower(), names, n=1, cutoff=0.75)
    hint = f"did you mean {missing.with_name(names[matches[0]])}?" if matches else f"expected {expected}"
    raise UserError(f"{path}: no such file or folder; {hint}")


def refuse_address(path: Path) -> None:
    """Raise a `UserError` for an address of the Hugging Face Hub, of which a ``Path`` has kept one slash."""
    if str(path).startswith("hf:/"):
        name = str(path).removeprefix("hf:/")
        raise UserError(
            f'hf://{name}: only Python reads models of the Hub: dmlkit.load("hf://{name}") embeds and compares images; '
            "commands take runs, galleries and embeddings on this machine"
        )


def require_folder(path: Path) -> None:
    """Raise a `UserError` unless a path is a folder."""
    require_path(path, "a folder")
    if not path.is_dir():
        raise UserError(f"{path}: is a file; expected a folder")


require_labels = partial(require_path, expected="labels (.npy, .npz, .txt, .csv or .parquet)")
require_table = partial(require_path, expected="a table (.csv or .parquet)")
require_study_file = partial(require_path, expected="a study, e.g. recipes/study/mpa.yaml")


def require_written(path: Path, mark: str, by: str) -> None:
    """Raise a `UserError` unless a folder has the file by which what a command wrote is known."""
    expected = f"a folder that dmlkit {by} wrote"
    require_path(path, expected)
    if not (path / mark).is_file():
        raise UserError(f"{path}: no {by} here ({mark} is missing); expected {expected}")


require_review = partial(require_written, mark=REVIEW_MARK, by="review")
require_study = partial(require_written, mark=STUDY_MARK, by="study")


def require_images(path: Path) -> None:
    """Raise a `UserError` unless there are images to embed; whether a single file will do is left to the model."""
    if not path.suffix or path.is_dir() or path.suffix.lower() in TABLES:
        require_addable(path)


def require_addable(path: Path) -> None:
    """Raise a `UserError` unless there are images to add to a gallery."""
    expected = "an image, a folder of images, or a table"
    require_path(path, expected)
    refuse_written(path, expected)
    if kind_of(path) == "images":
        require_some_images(path)


def require_some_images(path: Path) -> None:
    """Raise a `UserError` for a folder without images, or a file that is neither an image nor a table."""
    from dmlkit.files.readers.base import reader_of

    if reader_of(path) is not None:
        return
    if path.is_file():
        from dmlkit.files.image_file import BadImageError, decoding, opened

        try:
            with decoding(path), opened(path):  # its header
                pass
        except BadImageError as error:
            if path.suffix.lower() in EXTENSIONS:
                raise
            raise UserError(f"{error}; expected an image, a folder of images, or a table (.csv or .parquet)") from error
    elif path.is_dir():
        names = (Path(name) for _, _, names in os.walk(path, followlinks=True) for name in names)
        if not any(name.suffix.lower() in EXTENSIONS and not name.name.startswith(".") for name in names):
            from dmlkit.files.image_file import some_image_files

            some_image_files(path)  # raises the error
    else:
        require_table(path)


def require_dataset(path: Path, expected: str = "a folder with one subfolder per class, or a table") -> None:
    """Raise a `UserError` unless there are class folders, or a table."""
    require_path(path, expected)
    refuse_written(path, expected)
    from dmlkit.files.readers.base import reader_of

    if reader_of(path) is not None:
        return
    if path.is_dir() and all(entry.name.startswith(".") for entry in path.iterdir()):
        raise OptionError("dataset.root", f"{path}: {NO_CLASSES}")


def refuse_written(path: Path, expected: str) -> None:
    """Raise a `UserError` for a folder that dmlkit wrote, and which has no images of its own."""
    for kind, marks in WRITTEN.items():
        if all((path / name).exists() for name in marks):
            raise UserError(f"{path}: is {NAMES[kind]}; expected {expected}")


def require_image(path: Path) -> None:
    """Raise a `UserError` unless there is a file, which may be an image."""
    require_path(path, "an image")
    if path.is_dir():
        raise UserError(f"{path}: this is a folder; expected an image")


def partner_path(text: str) -> Path:
    """Read the path of a second run, or one of `PARTNERS`; ``./local`` is the run in a folder of this name.

    Example:
        >>> partner_path("local") == Path("local"), partner_path("./local") == Path.cwd() / "local"
        (True, True)
    """
    path = Path(text)
    return path.absolute() if path in PARTNERS and text != str(path) else path


def require_second_run(path: Path, allowed: Container[Path] = ()) -> None:
    """Raise a `UserError` unless a path is a run, or one of those of `PARTNERS` that are allowed."""
    if path in allowed:
        return
    if path in PARTNERS and not path.exists():
        raise UserError(f"--with {path}: only {PARTNERS[path]}; expected a second run")
    require_run(path)


def require_run(path: Path) -> None:
    """Raise a `UserError` unless a folder is a run, or a path stands for a pretrained model."""
    if model_name(path) is not None:
        return
    missing = [name for name in RUN_MARKS if not (path / name).exists()]
    if missing:
        refuse_address(path)
        refuse_other_models(path)
        if (path / "config.json").exists() and (path / "model.safetensors").exists():
            raise UserError(
                f"{path}: is a model that was exported for the Hub, which dmlkit.load reads; expected a run"
            )
        raise UserError(f"{path}: no run here ({' or '.join(missing)} is missing); expected a folder that train wrote")


def require_gallery(path: Path) -> None:
    """Raise a `UserError` unless a folder is a gallery whose creation was not interrupted."""
    if (path / GALLERY_MARK).exists():
        return
    if (path / CREATING_MARK).exists():
        raise UserError(f"{path}: the creation of this gallery was interrupted; rerun the same command to finish it")
    raise UserError(
        f"{path}: no gallery here ({GALLERY_MARK} is missing); expected a folder that dmlkit gallery create wrote"
    )


def is_study(path: Path) -> bool:
    """Return whether a folder is a study's."""
    return (path / STUDY_MARK).exists()


def without_set(text: str, values: Mapping[str, object]) -> str:
    """Return an error on data that may have moved, for a command that takes no ``--set``: the run records the place.

    Example:
        >>> without_set("photos: no such folder; if it has moved, use --set dataset.root=PATH", {"run": None})
        'photos: no such folder; if it has moved, change dataset.root in recipe.yaml of the run'
    """
    given = [value if isinstance(value, list) else [value] for value in values.values()]
    paths = [path for group in given for path in group if isinstance(path, Path)]
    if NO_IMAGES in text and (name := next(filter(None, map(model_name, paths)), None)):
        embed = f"run dmlkit embed {command_word(name)} FOLDER first"
        way = "name them with --set dataset.root=FOLDER" if "overrides" in values else embed
        return f"{name}: a pretrained model has no images of its own; {way}"
    of_gallery = any((path / GALLERY_MARK).exists() for path in paths)  # to whose run --set does not apply
    of_images = isinstance(values.get("images"), Path | list)
    before, moved, rest = text.partition(MOVED)
    if not moved or ("overrides" in values and not of_images and not of_gallery):
        return text
    from dmlkit.files.yaml_tree import read_yaml  # only for an error

    key, _, after = rest.partition("=PATH")
    file = "recipe.yaml of the run"
    for recipe in [path / "recipe.yaml" for path in paths]:
        with suppress(UserError, LookupError, TypeError):  # no recipe: nothing was read there
            if f"dataset.{key}: {Path(read_yaml(recipe, 'recipe', '').data['dataset'][key])}: " in before:
                file = str(recipe)
                break
    return f"{before}if it has moved, change dataset.{key} in {file}{after}"


def check_options(source: Path, kind: Kind, options: Mapping[str, object]) -> None:
    """Raise a `UserError` for the first option with a value that does not apply to the kind of a source."""
    for name, value in options.items():
        if value and kind not in APPLIES[name]:
            words = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
            text = name if value is True else f"{name} {words}"
            kinds = " or ".join(NAMES[other_kind] for other_kind in APPLIES[name] if other_kind != "backbone")
            way = f"use {OTHER[name]}" if name in OTHER else "remove this option"
            raise UserError(f"{text}: applies to {kinds}, but {source} is {NAMES[kind]}; {way}")
