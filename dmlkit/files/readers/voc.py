"""Annotations of Pascal VOC: an XML file per image, as LabelImg, CVAT and Roboflow write them."""

import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path, PureWindowsPath
from xml.etree import ElementTree

from dmlkit.errors import UserError
from dmlkit.files.outputs import BOX
from dmlkit.files.readers.base import ImageTable, Reader, counted_out, files_below, start_of, table_of, unlisted
from dmlkit.files.regular import EXTENSIONS, read_text

FOLDERS = ("", "Annotations", "annotations", "train", "train/annotations")  # where files are looked for
IMAGES = ("JPEGImages", "images")  # next to a folder of annotations
MOST_NAMES, MOST_READ = 1_000, 10  # in each folder, that are looked at, and opened
SIDES = ("xmin", "ymin", "xmax", "ymax")


class VocReader(Reader):
    """Reader of a folder of XML files: a row per object, with its name as the label, its box and CVAT's attributes."""

    title = "Pascal VOC"

    def recognizes(self, path: Path) -> bool:
        files = [path] if path.suffix.lower() == ".xml" else _some(path)
        # LabelImg writes <annotation verified="yes">; <annotations> is of CVAT
        return any(re.search(rb"<annotation[\s>]", start_of(file)) for file in files)

    def read(self, path: Path) -> ImageTable:
        folder = path.parent if path.is_file() else path
        has_images = any((folder.parent / name).is_dir() for name in IMAGES)
        root = folder.parent if has_images or folder.name.lower() == "annotations" else folder
        rows, places, faults, without = list[Mapping[str, object]](), list[str](), list[str](), 0
        notes, listed = list[str](), set[Path]()
        for file in [path] if path.is_file() else files_below(path, (".xml",), notes):
            try:
                image, objects = _parsed(file)
            except UserError as error:
                faults.append(str(error))
                continue
            place = _image(file, image, root)
            listed.add(place)
            name = place.relative_to(root).as_posix()
            file_rows = list(_rows(file, name, objects, faults))
            rows += file_rows
            places += [str(file)] * len(file_rows)
            without += not objects
        folders = {image.parent for image in listed if path.is_dir()}  # a single file is not of a whole folder
        images = [str(image) for folder in folders for image in _images_in(folder)]
        left_out = unlisted(images, map(str, listed), "no XML file names")
        notes += counted_out(path, [(without, "image without objects", "images without objects"), left_out])
        return ImageTable(table_of(rows), path, root, places, faults=faults, notes=notes)


def _some(folder: Path) -> list[Path]:
    """Return some XML files in one of the usual folders; some of them may be damaged."""
    for name in FOLDERS:
        try:
            entries = (entry.name for entry in os.scandir(folder / name) if not entry.name.startswith("."))
            names = list(islice(entries, MOST_NAMES))
        except OSError:
            continue
        if files := [file for file in sorted(names) if file.lower().endswith(".xml")]:
            return [folder / name / file for file in files[:MOST_READ]]
    return []


def _parsed(file: Path) -> tuple[str, list[ElementTree.Element]]:
    """Return the name of the image of a file, and its objects; entities might be files, or without end."""
    text = read_text(file)
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise UserError(f"{file}: has a DOCTYPE, which may define entities; remove it")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise UserError(f"{file}: cannot read this XML file: {error}") from error
    image = PureWindowsPath(root.findtext("filename") or "").name
    if root.tag != "annotation" or not image:
        raise UserError(f"{file}: has no annotation with a filename; expected one of Pascal VOC")
    return image, root.findall("object")


def _image(file: Path, name: str, root: Path) -> Path:
    """Return where the image of a file lies: with it, or in a folder of images next to its own; below a root."""
    candidates = [file.parent / name, *(file.parent.parent / folder / name for folder in IMAGES)]
    return next((path for path in candidates if path.is_file() and path.is_relative_to(root)), root / name)


def _images_in(folder: Path) -> Iterator[Path]:
    """Yield the image files in a folder, without hidden ones; none if there is no such folder."""
    for file in folder.iterdir() if folder.is_dir() else ():
        if file.suffix.lower() in EXTENSIONS and not file.name.startswith("."):
            yield file


def _rows(
    file: Path, name: str, objects: list[ElementTree.Element], faults: list[str]
) -> Iterator[Mapping[str, object]]:
    for number, element in enumerate(objects, start=1):
        cells = [element.findtext(f"bndbox/{side}") for side in SIDES]
        try:
            box = [float(cell or "") for cell in cells]
        except ValueError:
            faults.append(f"{file}: object {number}: got the box {cells}, expected the numbers {', '.join(SIDES)}")
            continue
        attributes = {each.findtext("name", ""): each.findtext("value") for each in element.iterfind("attributes/*")}
        yield attributes | {"path": name, "label": element.findtext("name"), **dict(zip(BOX, box, strict=True))}
