"""Miniature trees in the layouts in which the benchmarks are published: real JPEGs and MATLAB files."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

CUB = {1: "001.Black_footed_Albatross", 2: "002.Laysan_Albatross", 101: "101.White_Pelican", 102: "102.Western_Gull"}
CARS = {1: "AM General Hummer SUV 2000", 2: "Ram C/V Cargo Van 2012", 99: "Dodge Caliber 2012", 100: "Fiat 500 2012"}
PER_CLASS = 3


def photo(path: Path, seed: int, side: tuple[int, int] = (24, 18)) -> Path:
    """A JPEG of smooth noise, another for each seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(noise).resize(side, Image.Resampling.BICUBIC).save(path, quality=90)
    return path


def photos(root: Path, names: Iterable[str], first: int = 0, side: tuple[int, int] = (24, 18)) -> Path:
    """Photos of these names below a folder, each another one."""
    for number, name in enumerate(names, first):
        photo(root / name, number, side)
    return root


def birds(root: Path, names: Iterable[str], each: int, side: tuple[int, int] = (40, 30)) -> Path:
    """Photos of individuals in folders of their names, the ``n``-th of the ``m``-th from the seed 10 m + n."""
    for number, name in enumerate(names):
        photos(root / name, (f"{index}.jpg" for index in range(each)), first=10 * number, side=side)
    return root


def plain(root: Path, counts: dict[str, int], size: tuple[int, int] = (8, 8)) -> Path:
    """Images of one color each in folders of these names, the ``n``-th with n as its red."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            Image.new("RGB", size, (index, len(name), 0)).save(root / name / f"{index}.png")
    return root


def cub(root: Path) -> Path:
    """CUB_200_2011.tgz unpacked."""
    folder = root / "CUB_200_2011"
    images, labels, number = [], [], 0
    for label, name in CUB.items():
        for index in range(PER_CLASS):
            number += 1
            path = f"{name}/{name[4:]}_{index:04}_{number}.jpg"
            photo(folder / "images" / path, number)
            images.append(f"{number} {path}")
            labels.append(f"{number} {label}")
    (folder / "images.txt").write_text("\n".join(images) + "\n")
    (folder / "image_class_labels.txt").write_text("\n".join(labels) + "\n")
    (folder / "classes.txt").write_text("".join(f"{label} {name}\n" for label, name in CUB.items()))
    return root


def cub_images_only(root: Path) -> Path:
    """The layout that Proxy-Anchor's and others' code reads: only images/, with the litter of macOS."""
    cub(root)
    for path in (root / "CUB_200_2011").glob("*.txt"):
        path.unlink()
    (root / "CUB_200_2011" / "images" / CUB[1] / "._hidden.jpg").write_bytes(b"\0")
    return root


def presplit(root: Path, folder: str = ".") -> Path:
    """train/ and test/ folders of classes."""
    for part, classes in (("train", (1, 2)), ("test", (101, 102))):
        for label in classes:
            for index in range(PER_CLASS):
                photo(root / folder / part / str(label) / f"{index}.jpg", 10 * label + index)
    return root


def annotations(fields: dict[str, list]) -> np.ndarray:
    """A MATLAB structure array (1, N), as in the published files."""
    rows = list(zip(*fields.values(), strict=True))
    array = np.empty((1, len(rows)), dtype=[(name, object) for name in fields])
    for index, row in enumerate(rows):
        array[0, index] = tuple(row)
    return array


def car_rows() -> list[tuple[int, int]]:
    """(number, class) of each image."""
    return list(enumerate([label for label in CARS for _ in range(PER_CLASS)], start=1))


def car_names() -> np.ndarray:
    names = np.empty((1, 196), dtype=object)
    names[0, :] = [CARS.get(label, f"Car {label}") for label in range(1, 197)]
    return names


def cars(root: Path, folder: str = ".") -> Path:
    """car_ims.tgz and cars_annos.mat."""
    rows = car_rows()
    for number, _ in rows:
        photo(root / folder / "car_ims" / f"{number:06}.jpg", number)
    ones = [1] * len(rows)
    fields = {
        "relative_im_path": [f"car_ims/{number:06}.jpg" for number, _ in rows],
        **{f"bbox_{side}": ones for side in ("x1", "y1", "x2", "y2")},
        "class": [label for _, label in rows],
        "test": [number % 2 for number, _ in rows],
    }
    savemat(root / folder / "cars_annos.mat", {"annotations": annotations(fields), "class_names": car_names()})
    return root


def cars_devkit(root: Path) -> Path:
    """cars_train.tgz, cars_test.tgz, car_devkit.tgz and cars_test_annos_withlabels.mat."""
    rows = car_rows()
    (root / "devkit").mkdir(parents=True)
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": car_names()})
    for part, remainder in (("train", 0), ("test", 1)):
        chosen = [(number, label) for number, label in rows if number % 2 == remainder]
        for number, _ in chosen:
            photo(root / f"cars_{part}" / f"{number:05}.jpg", number)
        fields = {
            **{f"bbox_{side}": [1] * len(chosen) for side in ("x1", "y1", "x2", "y2")},
            "class": [label for _, label in chosen],
            "fname": [f"{number:05}.jpg" for number, _ in chosen],
        }
        file = "devkit/cars_train_annos.mat" if part == "train" else "cars_test_annos_withlabels.mat"
        savemat(root / file, {"annotations": annotations(fields)})
    return root


def cars_kaggle(root: Path) -> Path:
    """Kaggle's archive: a slash in a class name becomes a dash in its folder's."""
    root.mkdir(parents=True, exist_ok=True)
    names = [CARS.get(label, f"Car {label}") for label in range(1, 197)]
    (root / "names.csv").write_text("\n".join(names) + "\n")
    for part, remainder in (("train", 0), ("test", 1)):
        lines = []
        for number, label in car_rows():
            if number % 2 == remainder:
                folder = names[label - 1].replace("/", "-")
                photo(root / "car_data" / "car_data" / part / folder / f"{number:05}.jpg", number)
                lines.append(f"{number:05}.jpg,1,1,20,15,{label}")
        (root / f"anno_{part}.csv").write_text("\n".join(lines) + "\n")
    return root


def sop(root: Path) -> Path:
    """Stanford_Online_Products.zip unpacked: 4 products to train, 4 to test, of 2 kinds."""
    folder = root / "Stanford_Online_Products"
    number = 0
    for part, products in (("train", range(1, 5)), ("test", range(11319, 11323))):
        lines = ["image_id class_id super_class_id path"]
        for product in products:
            kind, name = ((1, "bicycle"), (2, "cabinet"))[product % 2]
            for index in range(PER_CLASS):
                number += 1
                path = f"{name}_final/{product}_{index}.JPG"
                photo(folder / path, number)
                lines.append(f"{number} {product} {kind} {path}")
        (folder / f"Ebay_{part}.txt").write_text("\n".join(lines) + "\n")
    return root


def inshop(root: Path, images: str = "Img/img", listed: str = "Eval") -> Path:
    """list_eval_partition.txt and img.zip unpacked: 2 garments to train, 2 with query and gallery."""
    statuses = {"id_00000001": ["train"] * 3, "id_00000002": ["train"] * 2}
    statuses |= {"id_00000003": ["query", "gallery", "gallery"], "id_00000004": ["gallery", "query"]}
    lines, number = [], 0
    for garment, each in statuses.items():
        kind = "WOMEN/Dresses" if garment < "id_00000003" else "MEN/Denim"
        for index, status in enumerate(each):
            number += 1
            path = f"{kind}/{garment}/{index:02}_1_front.jpg"
            photo(root / images / path, number)
            lines.append(f"img/{path}    {garment} {status}")
    (root / listed).mkdir(parents=True, exist_ok=True)
    text = "\n".join([str(len(lines)), "image_name item_id evaluation_status", *lines])
    (root / listed / "list_eval_partition.txt").write_text(text + "\n")
    return root
