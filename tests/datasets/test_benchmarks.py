"""The four benchmarks in every published layout: the split of the literature, labels from 0, every fault named."""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from scipy.io import savemat

from dmlkit.datasets import Cars196Config, Cub200Config, InShopConfig, SopConfig, cars196
from dmlkit.datasets.base import DatasetConfig
from dmlkit.errors import UserError
from tests.conftest import refuses
from tests.datasets import trees

Maker = Callable[[Path], Path]
BIRDS, MODELS, FOLDERS = [*trees.CUB.values()], [*trees.CARS.values()], ["1", "2", "101", "102"]
GARMENTS = [f"id_{number:08}" for number in range(1, 5)]
PRODUCTS = [str(number) for number in (*range(1, 5), *range(11_319, 11_323))]
LAYOUTS: list[tuple[str, Maker, list[str]]] = [
    *(("cub200", make, BIRDS) for make in (trees.cub, trees.cub_images_only)),
    *(("cars196", make, MODELS) for make in (trees.cars, trees.cars_devkit, trees.cars_kaggle)),
    ("cars196", partial(trees.cars, folder="cars196"), MODELS),  # Proxy-Anchor's root, as below
    ("sop", trees.sop, PRODUCTS),
    *((name, trees.presplit, FOLDERS) for name in ("cub200", "sop")),
    *(
        (name, partial(trees.presplit, folder=folder), FOLDERS)
        for name, folder in (("cub200", "cub200"), ("cars196", "cars196"), ("sop", "online_products"))
    ),
    ("inshop", trees.inshop, GARMENTS),
    ("inshop", partial(trees.inshop, images="Inshop_Clothes/Img/img", listed="Inshop_Clothes/Eval"), GARMENTS),
    ("inshop", partial(trees.inshop, images="img_highres", listed="."), GARMENTS),  # OML's root
]


@pytest.fixture(autouse=True)
def no_published_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The MATLAB files of the miniature trees are not the published ones."""
    monkeypatch.setattr(cars196, "MD5", {})


@pytest.mark.parametrize(("name", "make", "classes"), LAYOUTS)
def test_every_layout_has_the_split_of_the_literature(name: str, make: Maker, classes: list[str], tmp_path: Path):
    """That of Cars196 for the closed set is ignored; the queries and the gallery of In-Shop are kept apart."""
    config = DatasetConfig.variants[name](root=str(make(tmp_path)), validation_fraction=0)
    train, test = config.build("train"), config.build("test")
    half = len(classes) // 2
    assert [*train.class_names, *test.class_names] == classes and len(train.class_names) == half
    for dataset in (train, test):
        assert dataset.labels.bincount().tolist() == ([3, 2] if name == "inshop" else [trees.PER_CLASS] * half)
        assert dataset.sample(len(dataset) - 1).shape == (3, 18, 24)
        assert all(Path(path).is_file() for path in dataset.paths)
    assert not set(train.paths) & set(test.paths)
    assert len(config.build("all")) == len(train) + len(test)
    kinds = [None if part.super_classes is None else part.super_classes.tolist() for part in (train, test)]
    if name == "inshop":
        assert train.query is None and train.gallery is None and kinds == [[1, 1], [0, 0]]
        assert test.query is not None and test.query.tolist() == [True, False, False, False, True]
        assert test.gallery is not None and torch.equal(test.gallery, ~test.query)
    else:
        assert kinds == ([[1, 0, 1, 0]] * 2 if make is trees.sop else [None, None])


def test_inshop_images_can_be_chosen(tmp_path: Path):
    trees.inshop(tmp_path)
    trees.inshop(tmp_path, "Img/img_highres")
    assert "/img/" in InShopConfig(root=str(tmp_path)).build("test").paths[0]
    assert "/img_highres/" in InShopConfig(root=str(tmp_path), images="img_highres").build("test").paths[0]


@pytest.mark.parametrize("name", ["cub200", "cars196", "sop", "inshop"])
def test_a_missing_root_says_where_the_archive_is(name: str, tmp_path: Path):
    config = DatasetConfig.variants[name](root=str(tmp_path / "none"))
    with pytest.raises(UserError) as error:
        config.build("train")
    assert "no such folder" in str(error.value)
    for archive in config.published.archives:
        assert archive.file in str(error.value) and archive.url in str(error.value)
        assert (archive.md5 or "no md5 is published") in str(error.value)
    (tmp_path / "none").mkdir()
    refuses("expected", config.build, "train")


def test_missing_archive_members_are_named(tmp_path: Path):
    trees.cub(tmp_path)
    (tmp_path / "CUB_200_2011" / "image_class_labels.txt").unlink()
    with pytest.raises(UserError, match=r"image_class_labels\.txt: no such file"):
        Cub200Config(root=str(tmp_path)).build("train")
    trees.cub_images_only(tmp_path / "folders")
    images = tmp_path / "folders/CUB_200_2011/images"
    for number, folder in enumerate(sorted(images.iterdir())):
        folder.rename(images / f"Bird{number}")
    config = Cub200Config(root=str(tmp_path / "folders"))
    refuses(r"^dataset\.root: .*Bird0: expected a class folder such as 001", config.build, "train")
    trees.cars_devkit(tmp_path / "cars")
    (tmp_path / "cars" / "cars_test_annos_withlabels.mat").unlink()
    refuses(r"cars_test_annos_withlabels\.mat: no such file", Cars196Config(root=str(tmp_path / "cars")).build, "train")


def test_damaged_lists_are_named_with_their_lines(tmp_path: Path):
    trees.inshop(tmp_path)
    path = tmp_path / "Eval" / "list_eval_partition.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], "img/x.jpg id_00000009", *lines[5:-1]]))
    faults = InShopConfig(root=str(tmp_path)).listing().faults
    assert any(fault.startswith(f"{path}:5: got 'img/x.jpg id_00000009'") for fault in faults)
    assert any("lists 8 images, but its first line says 10; the download may be truncated" in fault for fault in faults)
    trees.cars(tmp_path / "cars")
    mat = tmp_path / "cars" / "cars_annos.mat"
    mat.write_bytes(mat.read_bytes()[:300])
    refuses("cannot read this MATLAB file", Cars196Config(root=str(tmp_path / "cars")).build, "train")


def test_a_damaged_byte_of_a_matlab_file_is_known_by_its_sum_s2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """This byte ends scipy.io.loadmat, and the process that it is in, with a segmentation fault."""
    trees.cars_devkit(tmp_path)
    mat = tmp_path / "cars_test_annos_withlabels.mat"
    content = bytearray(mat.read_bytes())
    published = hashlib.md5(content).hexdigest()
    monkeypatch.setattr(cars196, "MD5", {mat.name: published})
    assert len(Cars196Config(root=str(tmp_path)).build("test")) > 0
    content[2065] = 0o14
    mat.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{mat}: has the MD5 sum \w{{32}}, expected {published}; download it again$"):
        Cars196Config(root=str(tmp_path)).build("test")


def test_cells_of_a_matlab_file_that_are_none(tmp_path: Path):
    trees.cars(tmp_path)
    fields = {"relative_im_path": ["1.jpg", "3.jpg"], "class": [1.0, "one"]}
    contents = {"annotations": trees.annotations(fields), "class_names": trees.car_names()}
    savemat(tmp_path / "cars_annos.mat", contents)
    assert Cars196Config(root=str(tmp_path)).listing().faults == [
        f"{tmp_path / 'cars_annos.mat'}: has no relative_im_path and class of each image; expected the annotations of "
        "Cars196"
    ]


def test_numbers_that_are_none_are_named_with_their_lines_t11(tmp_path: Path):
    trees.cars_kaggle(tmp_path / "cars")
    annotations = tmp_path / "cars" / "anno_train.csv"
    lines = annotations.read_text().splitlines()
    annotations.write_text("\n".join([*lines, "9.jpg,1,1,20,15,²", "", "8.jpg,1,1,20,15," + "9" * 5000]))
    faults = Cars196Config(root=str(tmp_path / "cars")).listing().faults
    end = len(lines)
    assert [fault[:60] for fault in faults] == [
        f"{annotations}:{end + number}: got {text}"[:60]
        for number, text in ((1, "'9.jpg,1,1,20,15,²'"), (2, "''"), (3, "'8.jpg,1,1,20,15,9"))
    ]
    trees.sop(tmp_path / "sop")
    products = tmp_path / "sop" / "Stanford_Online_Products" / "Ebay_train.txt"
    lines = [f"99 {product} 1 bicycle_final/x.JPG" for product in (2**63, "²", "9" * 5000)]
    products.write_text(products.read_text() + "\n".join(lines))
    faults = SopConfig(root=str(tmp_path / "sop")).listing().faults
    assert [fault.partition(": got ")[2][:9] for fault in faults] == ["'99 92233", "'99 ² 1 b", "'99 99999"]
    trees.cub(tmp_path / "cub")
    labels = tmp_path / "cub" / "CUB_200_2011" / "image_class_labels.txt"
    labels.write_text(labels.read_text().replace("1 1\n", "1 ²\n", 1))
    faults = Cub200Config(root=str(tmp_path / "cub")).listing().faults
    assert faults == [f"{labels}: image 1 has class '²'; expected a number"]


def test_names_that_leave_the_root_are_refused(tmp_path: Path):
    trees.sop(tmp_path)
    path = tmp_path / "Stanford_Online_Products" / "Ebay_train.txt"
    path.write_text(path.read_text() + "99 4 1 ../../secret.jpg\n100 4 1 /etc/passwd\n")
    faults = SopConfig(root=str(tmp_path)).listing().faults
    assert len(faults) == 2 and all("leads out of the root" in fault for fault in faults)
    assert "'../../secret.jpg'" in faults[0] and ":14:" in faults[0] and "'/etc/passwd'" in faults[1]


def test_a_garment_in_two_splits_is_refused(tmp_path: Path):
    trees.inshop(tmp_path)
    path = tmp_path / "Eval" / "list_eval_partition.txt"
    path.write_text(path.read_text().replace("id_00000004 query", "id_00000002 query"))
    refuses("garment id_00000002 is in both train and test", InShopConfig(root=str(tmp_path)).build, "train")
