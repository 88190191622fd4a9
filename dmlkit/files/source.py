"""The one place that looks at what a path is, by the files that dmlkit writes, and which options go with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from dmlkit.errors import UserError
from dmlkit.files.outputs import RUN_MARKS

GALLERY_MARKS = ("gallery.json", "creating.json")  # the second one while it is created
Kind = Literal["run", "embeddings", "gallery", "array", "images"]
NAMES: dict[Kind, str] = {
    "run": "a run",
    "embeddings": "a folder of embeddings",
    "gallery": "a gallery",
    "array": "an .npy file",
    "images": "an image or a folder of images",
}
EXPECTED = "a run, a folder of embeddings, a gallery or an .npy file"
APPLIES: dict[str, tuple[Kind, ...]] = {
    "--split": ("run",),
    "--checkpoint": ("run",),
    "--dataset-root": ("run",),
    "--set": ("run",),
    "--device": ("run", "images"),
    "--run": ("images",),
    "--labels": ("array",),
    "--manifold": ("array",),
}
"""Kinds of source to which each option applies."""


def kind_of(path: Path, expected: str = EXPECTED) -> Kind:
    """Return what a path is, by the files that dmlkit writes.

    Raises:
        UserError: nothing is there.
    """
    if path.is_file():
        return "array" if path.suffix == ".npy" else "images"
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; expected {expected}")
    if any((path / name).exists() for name in GALLERY_MARKS):
        return "gallery"
    if any((path / name).exists() for name in ("manifest.json", "embeddings.npy")):
        return "embeddings"
    return "run" if any((path / name).exists() for name in RUN_MARKS) else "images"


def check_options(source: Path, kind: Kind, options: Mapping[str, object]) -> None:
    """Raise an error for an option that does not apply to the kind of a source.

    Args:
        source: the source.
        kind: its kind.
        options: value by option; an empty value is not checked.

    Raises:
        UserError: an option has a value and does not apply; the message names the first one.
    """
    for name, value in options.items():
        if value and kind not in APPLIES[name]:
            words = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
            text = name if value is True else f"{name} {words}"
            kinds = " or ".join(NAMES[one] for one in APPLIES[name])
            raise UserError(f"{text}: applies to {kinds}, but {source} is {NAMES[kind]}; remove this option")
