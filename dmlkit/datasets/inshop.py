"""In-Shop Clothes Retrieval dataset of DeepFashion: 7 982 garments, photographed by shops."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.archives import Archive, Published, locate, missing
from dmlkit.datasets.files.listing import ListedRows, ListedSplit, Listing
from dmlkit.errors import UserError
from dmlkit.files.paths import read_lines

LIST = "list_eval_partition.txt"
SITE = "https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html"
SPLIT_OF_STATUS: dict[str, ListedSplit] = {"train": "train", "query": "test", "gallery": "test"}


class InShopConfig(DatasetConfig, frozen=True):
    """In-Shop Clothes Retrieval (Liu et al. 2016): queries are compared with a separate gallery.

    Layouts: ``Eval/list_eval_partition.txt`` and ``Img/img/`` as unpacked, also in a folder ``Inshop_Clothes/``;
    the list next to ``img/`` or ``img_highres/``. The first two folders in ``img/`` (``WOMEN/Dresses``) are the
    super-class.
    """

    own_levels: ClassVar[tuple[str, ...]] = ("super_class", "class")
    published: ClassVar[Published] = Published(
        title="In-Shop Clothes Retrieval",
        archives=(Archive("list_eval_partition.txt", SITE, None), Archive("img.zip", SITE, None)),
        signs=(LIST, f"Eval/{LIST}", f"Anno/{LIST}", "Inshop_Clothes"),
        counts={"train": (25882, 3997), "test": (26830, 3985), "query": (14218, 3985), "gallery": (12612, 3985)},
    )

    name: Literal["inshop"] = "inshop"
    root: str = Field(min_length=1)
    """Folder into which the archives were unpacked."""
    images: Literal["img", "img_highres"] | None = None
    """Folder of the images; null uses ``img`` (256 x 256) if it exists, else ``img_highres``."""

    def listing(self) -> Listing:
        root = Path(self.root)
        folders = [f"{outer}{inner}" for outer in ("", "Inshop_Clothes/") for inner in ("Eval", "Anno", ".")]
        folder = locate(root, folders, (LIST,))
        if folder is None:
            raise missing(root, self.published, f"Eval/{LIST} and Img/img/, or {LIST} next to img/ or img_highres/")
        top = folder.parent if folder.name in ("Eval", "Anno") else folder
        return from_list(folder / LIST, top, self.images)


def from_list(path: Path, top: Path, images: str | None) -> Listing:
    """List the images: first those for training, then those of query and gallery."""
    choices = [images] if images else ["img", "img_highres"]
    root = locate(top, ("Img", "."), choices)
    if root is None:
        raise UserError(f"{top}: no images; expected {' or '.join(f'Img/{choice}/' for choice in choices)}")
    folder = next(choice for choice in choices if (root / choice).exists())
    rows = ListedRows(root)
    statuses: list[str] = []
    items: dict[tuple[ListedSplit, str], int] = {}
    kinds: dict[int, str] = {}
    ordered = sorted(read_rows(path, rows.faults), key=lambda row: SPLIT_OF_STATUS[row[3]] == "test")
    for line, name, item, status in ordered:
        label = items.setdefault((SPLIT_OF_STATUS[status], item), len(items))
        name = folder + name.removeprefix("img") if folder == "img_highres" else name
        if rows.add(f"{path}:{line}", name, label, SPLIT_OF_STATUS[status]):
            statuses.append(status)
            kinds.setdefault(label, "/".join(name.split("/")[1:3]))
    shared = {item for split, item in items if split == "train"} & {item for split, item in items if split == "test"}
    rows.faults += [f"{path}: garment {item} is in both train and test; expected only one" for item in sorted(shared)]
    kind_of = [kinds.get(label, "") for label in range(len(items))]
    return rows.listing(
        [item for _, item in items],
        query=np.array([status == "query" for status in statuses], dtype=bool),
        gallery=np.array([status == "gallery" for status in statuses], dtype=bool),
        super_classes=np.unique(kind_of, return_inverse=True)[1],
    )


def read_rows(path: Path, faults: list[str]) -> Iterator[tuple[int, str, str, str]]:
    """Yield number, name, item and status of each line of the list, below its count and the names of its columns."""
    lines = read_lines(path, faults)
    count = lines[0].strip() if lines else ""
    listed = 0
    for number, text in enumerate(lines[2:], start=3):
        cells = text.split()
        if len(cells) == 3 and cells[2] in SPLIT_OF_STATUS:
            listed += 1
            yield number, cells[0], cells[1], cells[2]
        elif cells:
            faults.append(f"{path}:{number}: got {text!r}, expected image_name item_id train|query|gallery")
    if lines and count != str(listed):
        way = "the download may be truncated: repeat it"
        faults.append(f"{path} lists {listed} images, but its first line says {count}; {way}")
