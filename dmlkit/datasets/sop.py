"""Stanford Online Products dataset: 22 634 products of 12 kinds, photographed by their sellers."""

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.archives import Archive, Published, locate, whole_number
from dmlkit.datasets.files.listing import ListedRows, ListedSplit, Listing
from dmlkit.datasets.folder import benchmark_folders
from dmlkit.files.paths import read_lines

COLUMNS = 4  # image_id class_id super_class_id path


class SopConfig(DatasetConfig, frozen=True):
    """Stanford Online Products (Oh Song et al. 2016): the official split by product; the 12 kinds are super-classes.

    Layouts: ``Stanford_Online_Products/`` with ``Ebay_train.txt`` and ``Ebay_test.txt`` as unpacked, or its
    contents; ``train/`` and ``test/`` folders of classes.
    """

    own_levels: ClassVar[tuple[str, ...]] = ("super_class", "class")
    published: ClassVar[Published] = Published(
        title="Stanford Online Products",
        archives=(
            Archive(
                "Stanford_Online_Products.zip",
                "https://cvgl.stanford.edu/projects/lifted_struct/",
                "7f73d41a2f44250d4779881525aea32e",
            ),
        ),
        signs=("Ebay_train.txt", "Ebay_test.txt", "Stanford_Online_Products"),
        counts={"train": (59551, 11318), "test": (60502, 11316)},
    )

    name: Literal["sop"] = "sop"
    root: str = Field(min_length=1)
    """Folder into which the archive was unpacked."""

    def listing(self) -> Listing:
        root = Path(self.root)
        folder = locate(root, ("Stanford_Online_Products", "online_products", "."), ("Ebay_train.txt", "Ebay_test.txt"))
        if folder is not None:
            return from_lists(folder)
        layouts = "Stanford_Online_Products/Ebay_train.txt"
        return benchmark_folders(root, ("online_products", "."), self.published, layouts)


def from_lists(folder: Path) -> Listing:
    """List the images of the two lists, with products in the order of their ids."""
    rows = ListedRows(folder)
    kinds: dict[int, int] = {}
    splits: tuple[ListedSplit, ...] = ("train", "test")
    for split in splits:
        path = folder / f"Ebay_{split}.txt"
        for line, text in enumerate(read_lines(path, rows.faults)[1:], start=2):
            cells = text.split(maxsplit=COLUMNS - 1)
            image, product, kind = (whole_number(cell) for cell in [*cells, "", "", ""][: COLUMNS - 1])
            if len(cells) < COLUMNS or image is None or product is None or kind is None:
                rows.faults.append(f"{path}:{line}: got {text!r}, expected image_id class_id super_class_id path")
                continue
            if rows.add(f"{path}:{line}", cells[-1], product, split):
                kinds[product] = kind
    products, labels = np.unique(np.array(rows.labels, dtype=np.int64), return_inverse=True)
    rows.labels = labels.tolist()
    super_classes = np.unique([kinds[product] for product in products], return_inverse=True)[1]
    return rows.listing([str(product) for product in products], super_classes=super_classes)
