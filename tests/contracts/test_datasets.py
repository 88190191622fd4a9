"""Every dataset: labels, names and images fit together, and no test class is trained on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv

from dmlkit.datasets import FolderConfig
from dmlkit.datasets.base import DatasetConfig
from dmlkit.testing import check_dataset
from tests.datasets import trees


def in_folders(root: Path) -> Path:
    trees.photos(root, (f"class {label}/{index}.jpg" for label in range(6) for index in range(2)))
    return root


def in_a_table(root: Path) -> Path:
    paths = [str(trees.photo(root / f"{index}.jpg", index).name) for index in range(12)]
    boxes = {name: [value] * 12 for name, value in (("x_1", 0), ("y_1", 0), ("x_2", 10), ("y_2", 12))}
    table = pa.table({"path": paths, "label": [index // 2 for index in range(12)], **boxes})
    csv.write_csv(table, root / "table.csv")
    return root / "table.csv"


def in_arrays(root: Path) -> Path:
    numbers = np.random.default_rng(0)
    np.save(root / "labels.npy", np.arange(12) // 2)
    np.save(root / "vectors.npy", numbers.normal(size=(12, 5)).astype(np.float32))
    return root / "vectors.npy"


def in_arrow_files(root: Path) -> Path:
    library = pytest.importorskip("datasets", reason="the extra dmlkit[hf] is not installed")
    paths = sorted(str(path) for path in in_folders(root / "photos").rglob("*.jpg"))
    columns = {"image": paths, "label": [Path(path).parent.name for path in paths]}
    rows = library.Dataset.from_dict(columns).cast_column("image", library.Image())
    library.disable_progress_bars()
    rows.save_to_disk(str(root / "saved"))
    return root / "saved"


MAKERS: dict[str, Callable[[Path], Path]] = {
    "cub200": trees.cub,
    "cars196": trees.cars_kaggle,  # its other layouts are in test_benchmarks
    "sop": trees.sop,
    "inshop": trees.inshop,
    "folder": in_folders,
    "hf": in_arrow_files,
    "table": in_a_table,
    "vectors": in_arrays,
}
GLYPHS: dict[str, Any] = {"classes": 20, "images_per_class": 2, "size": 16}


def test_every_dataset_of_dmlkit_is_made_here():
    ours = {name for name, kind in DatasetConfig.variants.items() if kind.__module__.startswith("dmlkit.")}
    assert ours == {*MAKERS, "glyphs"}


@pytest.mark.parametrize("name", MAKERS)
def test_files(name: str, tmp_path: Path):
    place = MAKERS[name](tmp_path)
    keys = {"table": {"file": place}, "vectors": {"embeddings": place, "labels": place.with_name("labels.npy")}}
    options = {key: str(path) for key, path in keys.get(name, {"root": place}).items()}
    check_dataset(DatasetConfig.variants[name](**options, validation_fraction=0.0))


@pytest.mark.parametrize(
    "options",
    [{}, {"validation_fraction": 0.0}, {"split": "reality_check", "fold": 1}, {"tail": 2.0, "images_per_class": 4}],
    ids=lambda options: str(options),
)
def test_glyphs(options: dict[str, Any]):
    check_dataset(DatasetConfig.variants["glyphs"](**GLYPHS | options))


class Overlapping(FolderConfig, frozen=True, abstract=True):
    """Tests on the images that it trains on."""

    def images_of(self, listing: Any, split: Any) -> Any:
        return super().images_of(listing, "train" if split == "test" else split)


def test_splits_of_known_classes_share_classes_but_no_image(tmp_path: Path):
    trees.photos(tmp_path, (f"class {label}/{index}.jpg" for label in range(3) for index in range(10)))
    for fraction in (0.0, 0.2):
        check_dataset(FolderConfig(root=str(tmp_path), split="images", validation_fraction=fraction))
    with pytest.raises(AssertionError, match=r"splits_share_no_class: .* train and test share .*class 0/0\.jpg"):
        check_dataset(Overlapping(root=str(tmp_path), split="images", validation_fraction=0.0))
