"""CUB-200-2011 dataset: 200 species of birds."""

import re
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.archives import Archive, Published, locate, whole_number
from dmlkit.datasets.files.listing import ListedRows, ListedSplit, Listing
from dmlkit.datasets.folder import benchmark_folders, class_folders, class_listing
from dmlkit.files.paths import read_lines

TRAINING_CLASSES = 100


class Cub200Config(DatasetConfig, frozen=True):
    """CUB-200-2011 (Wah et al. 2011): species 1-100 for training, 101-200 for testing; uncropped images.

    Layouts: ``CUB_200_2011/`` with ``images.txt`` as unpacked; only its ``images/`` folder, also as ``cub200/``;
    ``train/`` and ``test/`` folders of classes.
    """

    published: ClassVar[Published] = Published(
        title="CUB-200-2011",
        archives=(
            Archive(
                "CUB_200_2011.tgz", "https://data.caltech.edu/records/65de6-vp158", "97eceeb196236b17998738112f37df78"
            ),
        ),
        signs=("CUB_200_2011", "images.txt"),
        counts={"train": (5864, 100), "test": (5924, 100)},
    )

    name: Literal["cub200"] = "cub200"
    root: str = Field(min_length=1)
    """Folder into which the archive was unpacked."""

    def listing(self) -> Listing:
        root = Path(self.root)
        folder = locate(root, ("CUB_200_2011", "cub200", "."), ("images.txt", "images"))
        if folder is not None:
            return from_lists(folder) if (folder / "images.txt").exists() else from_folders(folder / "images")
        return benchmark_folders(root, ("cub200", "."), self.published, "CUB_200_2011/images.txt, CUB_200_2011/images/")


def part_of(number: int) -> ListedSplit:
    """Return the split of a species by its number, which starts at 1."""
    return "train" if number <= TRAINING_CLASSES else "test"


def from_lists(folder: Path) -> Listing:
    """List the images of ``images.txt`` with the classes of ``image_class_labels.txt``."""
    rows = ListedRows(folder / "images")
    labels = numbered(folder / "image_class_labels.txt", rows.faults)
    names = {number: name for number, name in numbered(folder / "classes.txt", rows.faults).items() if name}
    paths = numbered(folder / "images.txt", rows.faults)
    for number in sorted(set(paths) ^ set(labels)):
        rows.faults.append(f"{folder}: image {number} is in only one of images.txt and image_class_labels.txt")
    listed = {number: whole_number(labels[number]) for number in paths if number in labels}
    classes = sorted({label for label in listed.values() if label is not None})
    for number, label in listed.items():
        if label is not None:
            where = f"{folder / 'images.txt'}: image {number}"
            rows.add(where, paths[number], classes.index(label), part_of(label))
        else:
            where = f"{folder / 'image_class_labels.txt'}: image {number}"
            rows.faults.append(f"{where} has class {labels[number]!r}; expected a number")
    return rows.listing([names.get(label, str(label)) for label in classes])


def numbered(path: Path, faults: list[str]) -> dict[int, str]:
    """Read the lines ``NUMBER TEXT`` of a file; report other lines in ``faults``."""
    texts: dict[int, str] = {}
    for line, text in enumerate(read_lines(path, faults), start=1):
        first, _, rest = text.strip().partition(" ")
        number = whole_number(first)
        if number is not None and rest:
            texts[number] = rest
        elif text.strip():
            faults.append(f"{path}:{line}: got {text!r}, expected a number and a text")
    return texts


def from_folders(images: Path) -> Listing:
    """List the images below ``images/NNN.Name/``; the number determines the split."""
    classes, faults = list[tuple[Path, ListedSplit]](), list[str]()
    for folder in class_folders(images):
        if number := re.match(r"\d+", folder.name):
            classes.append((folder, part_of(int(number[0]))))
        else:
            faults.append(f"{folder}: expected a class folder such as 001.Black_footed_Albatross")
    return class_listing(images, classes, faults=faults)
