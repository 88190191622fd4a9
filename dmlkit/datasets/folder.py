"""A folder of images: one subfolder a class."""

import os
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from dmlkit.datasets.base import Dataset, DatasetConfig
from dmlkit.datasets.image import EXTENSIONS, read_image
from dmlkit.errors import UserError


class FolderConfig(DatasetConfig, frozen=True):
    """Your own images, one folder a class: ROOT/CLASS/*.jpg, or ROOT/train/CLASS and ROOT/test/CLASS.

    Without ``train`` and ``test`` folders the first half of the sorted class names trains, the rest tests.
    """

    name: Literal["folder"] = "folder"
    root: str = Field(min_length=1)
    """The folder, relative to where dmlkit is started."""

    def load(self, split: Literal["train", "test", "all"]) -> "Folder":
        root = Path(self.root)
        if not root.is_dir():
            raise UserError(f"dataset.root: {root}: no such folder; expected one subfolder of images per class")
        splits = {part: root / part for part in ("train", "test") if (root / part).is_dir()}
        if len(splits) == 1:
            missing = "test" if "train" in splits else "train"
            raise UserError(f"dataset.root: {root} has no folder {missing!r} beside {next(iter(splits))!r}; add it")
        if not splits:
            classes = class_folders(root)
            half = len(classes) // 2
            return Folder({"train": classes[:half], "test": classes[half:], "all": classes}[split], root)
        classes = {part: class_folders(folder) for part, folder in splits.items()}
        shared = {folder.name for folder in classes["train"]} & {folder.name for folder in classes["test"]}
        if shared:
            raise UserError(
                f"dataset.root: {root}: class {min(shared)!r} is in both train and test ({len(shared)} such); "
                "test classes must be unseen in training"
            )
        return Folder(classes["train"] + classes["test"] if split == "all" else classes[split], root)


class Folder(Dataset):
    """The images of some class folders.

    Args:
        classes: one folder each, with at least two images.
        root: for the message of an empty dataset.

    Raises:
        UserError: there are no classes, or one has fewer than two images.
    """

    def __init__(self, classes: list[Path], root: Path) -> None:
        if not classes:
            raise UserError(f"dataset.root: {root}: too few class folders; expected at least one to train, one to test")
        paths: list[str] = []
        labels: list[int] = []
        for label, folder in enumerate(classes):
            images = image_files(folder)
            if len(images) < 2:
                raise UserError(
                    f"{folder}: {len(images)} image(s); a class needs at least 2, to have something to find: "
                    "add images or remove the folder"
                )
            paths += images
            labels += [label] * len(images)
        super().__init__(torch.tensor(labels), [folder.name for folder in classes], paths)

    def image(self, index: int) -> Tensor:
        return read_image(self.paths[index])


def class_folders(root: Path) -> list[Path]:
    """The subfolders of a folder in the order of their names, hidden ones left out."""
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def image_files(folder: Path) -> list[str]:
    """The image files below a folder, sorted, hidden ones left out."""
    found: list[str] = []
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [
            os.path.join(directory, name)  # noqa: PTH118 - Path costs 10 s for a million files
            for name in sorted(files)
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS  # noqa: PTH122
        ]
    return found
