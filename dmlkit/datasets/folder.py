"""Dataset of a folder of images with one subfolder per class."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.image import EXTENSIONS
from dmlkit.datasets.files.listing import LISTED_SPLITS, ListedRows, ListedSplit, Listing
from dmlkit.datasets.files.paths import readable_name, unreadable_name
from dmlkit.errors import OptionError, UserError


class FolderConfig(DatasetConfig, frozen=True):
    """Your own images, one folder per class: ROOT/CLASS/*.jpg, or ROOT/train/CLASS and ROOT/test/CLASS.

    Without ``train`` and ``test`` folders, the first half of the sorted class names is for training, the rest for
    testing. A folder ``validation`` next to them may contain the validation classes.
    """

    name: Literal["folder"] = "folder"
    root: str = Field(min_length=1)
    """Folder of the images, relative to the working directory."""

    def listing(self) -> Listing:
        root = Path(self.root)
        if not root.is_dir():
            raise OptionError(
                "dataset.root",
                f"{root}: no such folder; expected one subfolder of images per class; if it has moved, "
                "use --set dataset.root=PATH",
            )
        if is_split(root):
            return split_folders(root)
        classes = class_folders(root)
        half = len(classes) // 2
        return class_listing(root, [(folder, "train" if i < half else "test") for i, folder in enumerate(classes)])


def is_split(root: Path) -> bool:
    """Return whether a folder has ``train`` or ``test`` folders instead of class folders."""
    return any((root / split).is_dir() for split in ("train", "test"))


def split_folders(root: Path) -> Listing:
    """List the images of ROOT/train/CLASS, ROOT/test/CLASS and, if it exists, ROOT/validation/CLASS.

    Raises:
        UserError: ``train`` or ``test`` is missing.
    """
    return class_listing(
        root, [(folder, split) for split in splits_below(root) for folder in class_folders(root / split)]
    )


def splits_below(root: Path) -> list[ListedSplit]:
    """Return the splits that have a folder below a root.

    Raises:
        UserError: ``train`` or ``test`` is missing.
    """
    splits: list[ListedSplit] = [split for split in LISTED_SPLITS if (root / split).is_dir()]
    for missing, present in (("test", "train"), ("train", "test")):
        if missing not in splits:
            raise OptionError("dataset.root", f"{root} has a folder {present!r} but no folder {missing!r}; add it")
    return splits


def class_listing(root: Path, classes: list[tuple[Path, ListedSplit]]) -> Listing:
    """List the images of class folders; report classes with fewer than two images and names that are not UTF-8.

    Raises:
        UserError: there is no class, or none of several has two images.
    """
    if not classes:
        raise OptionError(
            "dataset.root", f"{root}: no class folders; expected at least one for training and one for testing"
        )
    rows = ListedRows(root)
    labels: dict[str, int] = {}
    few = 0
    for folder, split in classes:
        if not readable_name(folder.name):
            rows.faults.append(unreadable_name(str(folder)))
            continue
        label = labels.setdefault(folder.name, len(labels))
        images = image_files(folder)
        if len(images) < 2:
            few += 1
            rows.faults.append(
                f"{folder}: the class has {len(images)} image(s), expected at least 2; add images or remove the folder"
            )
        for path in images:
            if readable_name(path):
                rows.add(str(folder), os.path.relpath(path, root), label, split)
            else:
                rows.faults.append(unreadable_name(path))
    if few == len(classes) > 1:  # one line instead of one per class
        raise OptionError(
            "dataset.root",
            f"{root}: none of its {few} classes has two images; expected at least 2 per class; add images",
        )
    return rows.listing(list(labels))


def class_folders(root: Path) -> list[Path]:
    """Return the subfolders of a folder, sorted by name, without hidden ones."""
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def image_files(folder: Path, *, images: bool = True) -> list[str]:
    """Return the image files below a folder, sorted, without hidden ones; or instead those that are not ``images``.

    Links to folders are followed. Each folder is visited once, so that circular links end.

    Raises:
        UserError: a subfolder cannot be read.
    """
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    for directory, folders, files in os.walk(folder, onerror=_refuse_folder, followlinks=True):
        status = os.stat(directory)  # noqa: PTH116 - as below
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [
            os.path.join(directory, name)  # noqa: PTH118 - Path takes 10 s for a million files
            for name in sorted(files)
            if not name.startswith(".") and (os.path.splitext(name)[1].lower() in EXTENSIONS) == images  # noqa: PTH122
        ]
    return found


def stray_files(root: Path, listed: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the files below a root that are not images, and the images that are not listed, relative to the root."""
    known = set(listed)
    images = [os.path.relpath(path, root) for path in image_files(root)]
    others = [os.path.relpath(path, root) for path in image_files(root, images=False)]
    return others, [name for name in images if name not in known and readable_name(name)]  # others are faults


def _refuse_folder(error: OSError) -> None:
    raise UserError(
        f"{error.filename}: cannot read this folder: {error.strerror}; change its permissions or move it elsewhere"
    ) from error
