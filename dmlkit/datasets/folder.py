"""Dataset of a folder of images with one subfolder per class."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from dmlkit.datasets.base import DatasetConfig, Split
from dmlkit.datasets.files.archives import Published, locate, missing
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.listing import LISTED_SPLITS, ListedRows, ListedSplit, Listing
from dmlkit.errors import OptionError, counted, some_of
from dmlkit.files.image_file import OUTSIDE, LeftOut, image_files, reason_left_out
from dmlkit.files.labels import label_notes, path_label
from dmlkit.files.paths import readable_name, unreadable_name
from dmlkit.files.readers.base import other_lists
from dmlkit.files.regular import EXTENSIONS
from dmlkit.files.source import NO_CLASS_FOLDERS, NO_CLASSES


class FolderConfig(DatasetConfig, frozen=True):
    """Your own images, one folder per class: ROOT/CLASS/*.jpg, or ROOT/train/CLASS and ROOT/test/CLASS.

    Without ``train`` and ``test`` folders, the first half of the sorted class names is for training, the rest for
    testing. A folder ``validation`` next to them may contain the validation classes. With ``levels: [genus, species]``
    the folders of classes are nested: ROOT/GENUS/SPECIES/*.jpg.
    """

    titled_by: ClassVar = "root"
    name: Literal["folder"] = "folder"
    root: str = Field(min_length=1)
    """Folder of the images, relative to the working directory."""

    def listing(self) -> Listing:
        root = Path(self.root)
        if not root.is_dir():
            raise OptionError("dataset.root", f"{root}: {NO_CLASS_FOLDERS}")
        hint = other_lists(root)
        try:
            if is_split(root):
                listing = split_folders(root, self.levels)
            else:
                classes, faults = nested_folders(root, self.levels)
                listing = class_listing(root, [(folder, "train") for folder in classes], self.levels, faults).halved()
        except OptionError as error:
            raise OptionError(error.key, f"{error.message}; {hint}" if hint else error.message) from None
        (listing.faults or listing.notes).extend([hint] if hint else [])
        return listing

    def images_of(self, listing: Listing | None, split: Split) -> Dataset:
        if split in ("train", "validation") and self.split != "all":
            self.check_depth()
        return super().images_of(listing, split)

    def check_depth(self) -> None:
        """Raise an error if there are too few classes, but folders with several below, as of an unpacked archive."""
        root = Path(self.root)
        splits = [split for split in (root / "train", root / "test") if split.is_dir()]
        for top in [] if self.levels else splits or [root]:
            outer, *inner = folder_levels(top)
            deeper = next((level[0].parent for level in inner if len(level) > 1), None)
            if deeper is None or len(outer) >= (2 if splits else 4):
                continue
            least, way = "2 to train on and 2 to test on", f"give {deeper}, which has several"
            if splits:
                least, way = "2", f"move the folders of {deeper} to {top}, if they are the classes"
            elif len(outer) > 1:
                way = f"if the classes are those in {deeper}, give it, or name the levels of folders in dataset.levels"
            has = f"{counted(len(outer), 'class', 'classes')}, {some_of([folder.name for folder in outer])}"
            raise OptionError("dataset.root", f"{top}: has {has}; expected at least {least}: {way}")


def is_split(root: Path) -> bool:
    """Return whether a folder has ``train`` or ``test`` folders instead of class folders.

    A class may be called train: then no folders of classes are below it, and other classes, but no test, next to it.
    """
    splits = [root / split for split in ("train", "test") if (root / split).is_dir()]
    if len(splits) != 1:
        return bool(splits)
    return bool(class_folders(splits[0])) or {folder.name for folder in class_folders(root)} <= {*LISTED_SPLITS}


def split_folders(root: Path, levels: Sequence[str] = ()) -> Listing:
    """List the images of ROOT/train/CLASS, ROOT/test/CLASS and, if it exists, ROOT/validation/CLASS."""
    for absent, present in (("test", "train"), ("train", "test")):
        if not (root / absent).is_dir():
            raise OptionError("dataset.root", f"{root} has a folder {present!r} but no folder {absent!r}; add it")
    classes, faults = list[tuple[Path, ListedSplit]](), list[str]()
    for split in LISTED_SPLITS:
        if (root / split).is_dir():
            folders, wrong = nested_folders(root / split, levels)
            classes.extend((folder, split) for folder in folders)
            faults += wrong
    return class_listing(root, classes, levels, faults)


def benchmark_folders(root: Path, names: Sequence[str], published: Published, layouts: str) -> Listing:
    """List the images of a benchmark that is stored as ``train/`` and ``test/`` folders of classes, see `locate`.

    ``layouts`` are files and folders of its other layouts, none of which the root has.
    """
    folder = locate(root, names, ("train", "test"))
    if folder is None or not is_split(folder):
        raise missing(root, published, f"{layouts} or train/ and test/")
    return split_folders(folder)


def class_listing(
    root: Path, classes: list[tuple[Path, ListedSplit]], levels: Sequence[str] = (), faults: Iterable[str] = ()
) -> Listing:
    """List the images of class folders; report folders without images and names that are not UTF-8."""
    rows = ListedRows(root)
    rows.faults += faults
    if not classes:
        first, *others = rows.faults or [f"{root}: {NO_CLASSES}"]
        more = f" ({len(others)} more folders are wrong)" if others else ""
        raise OptionError("dataset.levels" if levels and rows.faults else "dataset.root", f"{first}{more}")
    left_out = LeftOut(root)
    count_outside(root, [folder for folder, _ in classes], left_out)
    labels: dict[str, int] = {}
    counts: dict[str, int] = {}
    empty: list[str] = []
    for folder, split in classes:
        parts = folder.parts[-max(1, len(levels)) :]
        name, meant = "/".join(parts), path_label(parts)
        if not readable_name(name):
            rows.faults.append(unreadable_name(str(folder)))
            continue
        images = image_files(folder, left_out)
        deeper = next((path for path in images if levels and Path(path).parent != folder), None)
        if deeper:
            depth = f"the {len(levels)} levels {'/'.join(levels)}"
            rows.faults.append(f"{deeper}: lies deeper than {depth}; move it up or name one more level")
            continue
        counts[name] = counts.get(name, 0) + len(images)
        label = -1 if meant is None else labels.setdefault(meant, len(labels))
        if not images and meant is not None:
            empty.append(str(folder))
        for path in images:
            if readable_name(path):
                rows.add(str(folder), os.path.relpath(path, root), label, split)
            else:
                rows.faults.append(unreadable_name(path))
    if empty:
        folders = counted(len(empty), "class folder has", "class folders have")
        rows.faults.append(f"{root}: {folders} no images: {some_of(empty)}; add images or remove the folders")
    notes = label_notes(counts, str(root), lambda name: path_label(name.split("/")))
    return rows.listing(list(labels), notes=[*notes, *filter(None, [left_out.message])])


def class_folders(root: Path) -> list[Path]:
    """Return the subfolders of a folder, sorted by name, without hidden ones and links to a folder above them."""
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    place = root.resolve()
    return [path for path in folders if not (path.is_symlink() and place.is_relative_to(path.resolve()))]


def nested_folders(root: Path, levels: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the class folders below a root, sorted, and the problems of the folders above them.

    There is one level of folders per name in ``levels``, coarsest first, and one if there are no names.
    """
    folders, faults = class_folders(root), []
    for depth, level in enumerate(levels[1:], start=1):
        inner = [(folder, class_folders(folder)) for folder in folders]
        for folder, below in inner:
            loose = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix.lower() in EXTENSIONS]
            upper = "/".join(levels[:depth])
            if loose:
                faults.append(f"{loose[0]}: lies in a {upper} folder, expected folders {'/'.join(levels)}; move it")
            elif not below:
                faults.append(f"{folder}: has no {level} folders, expected {'/'.join(levels)}; add one or remove it")
        folders = [path for _, below in inner for path in below]
    return folders, faults


def folder_levels(root: Path) -> list[list[Path]]:
    """Return the folders of each level above the images, of one branch: the outermost, those in the first of them, ...

    There is one level, the classes, if one of its folders has images of its own.
    """
    levels = [class_folders(root)]
    while levels[-1] and all(
        class_folders(folder) and not any(path.suffix.lower() in EXTENSIONS for path in folder.iterdir())
        for folder in levels[-1]
    ):
        levels.append(class_folders(levels[-1][0]))
    return levels


def count_outside(root: Path, classes: Iterable[Path], left_out: LeftOut) -> None:
    """Count what lies below a root and in no class folder: files next to them, and other folders."""
    above = {place for folder in classes for place in folder.parents if place.is_relative_to(root)}
    taken, others = {*classes, *above}, list[Path]()
    for place in sorted(above):
        for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
            if not entry.is_dir():
                left_out.add(entry.path, OUTSIDE if reason_left_out(entry.path) in EXTENSIONS else "")
            elif entry.name.startswith("."):
                left_out.add(entry.path, "hidden folder")
            elif Path(entry.path) not in taken:
                others.append(Path(entry.path))
    if others:  # those that no link leads to or above
        read = {place for folder in classes for place in (folder.resolve(), *folder.resolve().parents)}
        for image in (path for other in others if other.resolve() not in read for path in image_files(other, left_out)):
            left_out.add(image, OUTSIDE)
