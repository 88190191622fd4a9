"""Folders of the library ``datasets``: the images and labels of the files they were made from, and what is refused."""

from errno import EIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from dmlkit.datasets import FolderConfig, HfConfig
from dmlkit.datasets.files.image import read_image
from dmlkit.datasets.hf import saved_images
from dmlkit.errors import UserError
from dmlkit.files.image_table import read_images
from dmlkit.loading.check import dataset_at, survey
from dmlkit.recipe.file import read_recipe
from dmlkit.training import estimate
from dmlkit.vectors.images import images_at
from tests.conftest import refuses
from tests.datasets import trees

library: Any = pytest.importorskip("datasets", reason="the extra dmlkit[hf] is not installed")
SIDES = ["left", None] * 9


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six classes of three photos."""
    root = tmp_path_factory.mktemp("photos")
    trees.photos(root, (f"c{label}/{index}.jpg" for label in range(6) for index in range(3)))
    return root


@pytest.fixture(scope="module")
def rows(photos: Path) -> Any:
    """The photos as rows; the order of the names of classes is not that of the alphabet."""
    library.disable_progress_bars()
    paths = sorted(photos.rglob("*.jpg"))
    names = [f"c{label}" for label in (5, 3, 1, 0, 2, 4)]
    kinds = {"image": library.Image(), "label": library.ClassLabel(names=names), "side": library.Value("string")}
    columns = {"image": [str(path) for path in paths], "label": [names.index(path.parent.name) for path in paths]}
    return library.Dataset.from_dict(columns | {"side": SIDES}, features=library.Features(kinds))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def homes(rows: Any, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the rows are in each form; nothing writes there."""
    root = tmp_path_factory.mktemp("homes")
    rows.save_to_disk(str(root / "saved"))
    file = root / "parquet" / "data" / "train-00000-of-00001.parquet"
    file.parent.mkdir(parents=True)
    files = [{"bytes": path.read_bytes(), "path": None} for path in sorted(photos.rglob("*.jpg"))]
    columns = {"image": files, "label": list(rows["label"]), "side": SIDES}
    library.Dataset.from_dict(columns, features=rows.features).to_parquet(str(file))
    nested = root / "hub" / "birds" / "train-00000-of-00001.parquet"  # a folder per configuration
    nested.parent.mkdir(parents=True)
    plain = {"image": files, "label": [rows.features["label"].names[number] for number in rows["label"]]}
    parquet.write_table(pa.table(plain), nested)  # without the library's own description
    places = {"saved": root / "saved", "parquet": root / "parquet", "file": file, "folder": photos}
    return places | {"nested": nested.parent.parent, "plain": nested.parent}


@pytest.mark.parametrize("kind", ["saved", "parquet", "folder", "plain"])
def test_equals_the_folder_that_it_was_made_from(kind: str, homes: dict[str, Path], photos: Path):
    config = HfConfig(root=str(homes[kind]), validation_fraction=0)
    for split in ("train", "test"):
        found, expected = config.build(split), FolderConfig(root=str(photos), validation_fraction=0).build(split)
        assert found.class_names == expected.class_names and torch.equal(found.labels, expected.labels)
        assert found.file(0) is None
        for index in range(len(expected)):
            assert torch.equal(found.sample(index), read_image(expected.paths[index]))


def test_splits_are_used_if_they_share_no_class_and_pooled_if_asked(rows: Any, tmp_path: Path):
    order = rows.features["label"].names
    parts = {"train": range(9), "validation": range(9, 12), "test": range(12, 18)}
    library.DatasetDict({name: rows.select(part) for name, part in parts.items()}).save_to_disk(str(tmp_path / "own"))
    config = HfConfig(root=str(tmp_path / "own"))
    assert [config.build(split).class_names for split in parts] == [("c0", "c1", "c2"), ("c3",), ("c4", "c5")]
    assert sorted(order) == list(config.build("all").class_names)
    library.DatasetDict({"train": rows, "dev": rows}).save_to_disk(str(tmp_path / "dev"))
    library.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(UserError, match=r"both: 6 classes are in several splits .*; use dataset\.split=images"):
        HfConfig(root=str(tmp_path / "both")).build("train")
    with pytest.raises(UserError, match=r"dataset\.split: .*dev: unknown split 'dev'; expected train, validation"):
        HfConfig(root=str(tmp_path / "dev")).build("train")
    pooled = HfConfig(root=str(tmp_path / "dev"), split="halves", validation_fraction=0).build("train")
    assert len(pooled) == 18 and pooled.class_names == ("c0", "c1", "c2")
    assert pooled.paths[0].endswith("train/0") and pooled.paths[17].endswith("dev/8")


def test_rows_without_label_or_image_are_named(rows: Any, photos: Path, tmp_path: Path):
    columns = {"image": [str(photos / "c0" / "0.jpg"), None, "/etc/hostname", None], "label": ["a", "a", "b", None]}
    made = library.Dataset.from_dict(columns).cast_column("image", library.Image(decode=False))
    made.save_to_disk(str(tmp_path / "holes"))
    assert HfConfig(root=str(tmp_path / "holes")).build("all").labels.tolist() == [0, 0, 1]
    made.select(range(3)).save_to_disk(str(tmp_path / "no_image"))
    images = HfConfig(root=str(tmp_path / "no_image")).build("all")
    assert images.class_names == ("a", "b") and images.sample(0).shape[0] == 3
    refuses(r"no_image/train/1: this row has no image", images.sample, 1)
    refuses(r"no_image/train/2: (the image is outside|cannot read this image)", images.sample, 2)


def test_what_is_wrong_with_a_folder_is_one_line(rows, photos, tmp_path, monkeypatch):
    rows.add_column("other", [0.5] * 18).save_to_disk(str(tmp_path / "rows"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "x.parquet").write_bytes(b"no parquet")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"root": "nothing"}, r"dataset\.root: nothing: no such folder"),
        ({"root": str(tmp_path / "empty")}, r"dataset\.root: .*empty: no dataset; expected a folder of save_to_disk"),
        ({"root": str(tmp_path / "broken")}, r"dataset\.root: .*broken: cannot read this dataset: "),
        ({"image": "photo"}, r"dataset\.image: .*has no column 'photo'; expected one of image, label, side, other"),
        ({"image": "label"}, r"dataset\.image: .*column 'label' of train has type ClassLabel, expected Image"),
        ({"label": "other"}, r"dataset\.label: .*column 'other' of train has type float64, expected ClassLabel, text"),
    ]
    for options, said in cases:
        refuses(said, HfConfig(**({"root": str(tmp_path / "rows")} | options)).build, "train")
    monkeypatch.setattr("dmlkit.datasets.hf.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"datasets is not installed; install it with: pip install 'dmlkit\[hf\]'"):
        HfConfig(root=str(tmp_path / "rows")).build("train")


@pytest.mark.parametrize("content", ["{", "[]", '{"features": {"image": 3}}'])
def test_a_damaged_description_is_one_line(content: str, rows: Any, tmp_path: Path):
    rows.save_to_disk(str(tmp_path / "rows"))
    (tmp_path / "rows/dataset_info.json").write_text(content)
    refuses(r"rows", lambda: dataset_at(tmp_path / "rows").build("test"))


@pytest.mark.parametrize("kind", ["saved", "parquet", "file", "nested"])
def test_stored_images_are_recognized_with_their_columns(kind: str, homes: dict[str, Path], photos: Path):
    config = dataset_at(homes[kind])
    assert isinstance(config, HfConfig) and (config.image, config.label) == ("image", "label")
    expected = FolderConfig(root=str(photos), validation_fraction=0).build("test")
    found = config.build("test")
    assert found.class_names == expected.class_names
    assert torch.equal(found.sample(4), expected.sample(4))
    assert survey(config).sides == (18, 18, 18)
    if kind == "file":
        with pytest.raises(UserError, match="column 'path' holds images instead of their paths; dmlkit data convert"):
            read_images(homes[kind]).table.to_pylist()


@pytest.mark.parametrize("kind", ["saved", "parquet", "file"])
def test_stored_images_are_saved_as_files_for_all_commands(kind, homes, photos, tmp_path, dmlkit):
    """The bytes are those of the files that they were made from; other columns stay."""
    table = tmp_path / "out" / "t.csv"
    assert "wrote" in dmlkit("data", "convert", homes[kind], "-o", table).ok().out
    files = sorted(photos.rglob("*.jpg"))
    listed = images_at(table)
    assert [Path(path).read_bytes() for path in listed.paths] == [file.read_bytes() for file in files]
    assert listed.label_names(listed.labels) == [file.parent.name for file in files]
    assert read_images(table).table["side"].to_pylist() == SIDES
    dmlkit("data", "convert", homes[kind], "-o", table).refused("t: exists already, where the images would be saved")


def test_what_is_no_image_is_left_out_with_its_row(rows: Any, photos: Path, tmp_path: Path):
    image = (photos / "c0" / "0.jpg").read_bytes()
    files = [{"bytes": image, "path": None}, {"bytes": b"none", "path": None}, None]
    columns = {"image": files, "label": ["a", "a", "b"], "path": ["x", "y", "z"]}
    made = library.Dataset.from_dict(columns).cast_column("image", library.Image(decode=False))
    library.DatasetDict({"train": made, "a.b": made}).save_to_disk(str(tmp_path / "d"))
    with saved_images(tmp_path / "d", {"path": "image"}, tmp_path / "out") as found:
        assert not (tmp_path / "out").exists()
    assert found is not None and found.table.to_pydict() == {
        "path": ["train-000000.jpg", "a_b-000000.jpg"],
        "label": ["a", "a"],
        "split": ["train", "a.b"],
    }
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a_b-000000.jpg", "train-000000.jpg"]
    assert len(found.faults) == 4 and "row 2 of train: cannot read this image" in found.faults[0]
    assert found.notes == [f"{tmp_path / 'd'}: left out: other columns path"]
    with saved_images(photos, {}, tmp_path / "other") as none:
        assert none is None
    assert not (tmp_path / "other").exists()


def test_splits_that_differ_by_a_number_are_saved_under_names_of_their_own(rows: Any, tmp_path: Path):
    library.DatasetDict({"fold1": rows.select([0, 1]), "fold2": rows.select([9])}).save_to_disk(str(tmp_path / "d"))
    with saved_images(tmp_path / "d", {}, tmp_path / "out") as found:
        assert found is not None and found.table["split"].to_pylist() == ["fold1", "fold1", "fold2"]
    plain = rows.cast_column("image", library.Image(decode=False))
    expected = [plain[row]["image"] for row in (0, 1, 9)]
    contents = [cell["bytes"] or Path(cell["path"]).read_bytes() for cell in expected]
    assert [(tmp_path / "out" / name).read_bytes() for name in found.table["path"].to_pylist()] == contents


def test_start_names_the_columns(rows, tmp_path, dmlkit, monkeypatch):
    monkeypatch.setattr(estimate, "_computing", lambda *_, **__: 1e-3)
    rows.rename_columns({"image": "photo", "label": "species"}).save_to_disk(str(tmp_path / "birds"))
    refuses(r"birds: has no column 'label'.*it has photo, species.*--column label=NAME", dataset_at, tmp_path / "birds")
    recipe = tmp_path / "birds.yaml"
    result = dmlkit("start", tmp_path / "birds", "--column", "label=species", "-o", recipe, "--device", "cpu")
    assert result.code == 0 and "training time is not known" not in result.out
    config = read_recipe(recipe).dataset
    assert isinstance(config, HfConfig) and (config.image, config.label) == ("photo", "species")


@pytest.mark.parametrize("option", ["unknown=c3", "group=day", "labl=label", "label="])
def test_other_columns_of_stored_images_are_refused(option: str, homes: dict[str, Path], tmp_path, dmlkit):
    name, _, column = option.partition("=")
    message = f"^--column {option}: {homes['file']} stores its images, so only path=NAME and label=NAME apply; save"
    refuses(message, dataset_at, homes["file"], columns={name: column})
    dmlkit("data", "convert", homes["file"], "--column", option, "-o", tmp_path / "t.csv").refused(option)
    assert not (tmp_path / "t").exists()


def test_a_conversion_that_was_cut_off_before_its_table_runs_again(homes, tmp_path, dmlkit, monkeypatch):
    def cut_off(*_: object) -> None:
        raise OSError(EIO, "cut off")

    with monkeypatch.context() as patch:
        patch.setattr("dmlkit.files.image_table.write_images", cut_off)
        dmlkit("data", "convert", homes["file"], "-o", tmp_path / "t.csv").refused("cut off")
    assert "18 rows" in dmlkit("data", "convert", homes["file"], "-o", tmp_path / "t.csv").ok().out
    assert len(images_at(tmp_path / "t.csv")) == len(list((tmp_path / "t").iterdir())) == 18
