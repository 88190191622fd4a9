"""Boxes of images: YOLO's text files, COCO's annotations, MegaDetector's output, and the check of those of tables."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import fitted, upright_size
from dmlkit.datasets.files.paths import inside
from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt
from dmlkit.files.image_file import BadImageError, Box, decoding
from dmlkit.files.regular import EXTENSIONS, read_text

MOST_LISTED = 3  # problems in a message: a wrong unit or other sizes of images are the same problem in each box
LEAST_CONFIDENCE = 0.2  # of a detected box
ANIMAL = "animal"  # the category of MegaDetector that is used, instead of persons and vehicles
CLASSES = "classes.txt"  # names of YOLO's classes, in the folder of its labels
Name = int | str
Four = tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat]


class Boxes(NamedTuple):
    """Options on the boxes of images."""

    source: Path | None = None
    """Folder of YOLO's text files, or a JSON file of COCO's annotations or of MegaDetector. None: a table has boxes."""
    margin: float = 0.0
    """Margin on each side, as a share of the box's width or height; it ends at the border of the image."""
    confidence: float | None = None
    """Boxes of ``source`` that a detector is less sure of are left out. Default: 0.2."""

    def given(self) -> dict[str, object]:
        """Return the options that apply to images alone."""
        return {"--boxes": self.source, "--box-margin": self.margin}

    def check(self) -> None:
        """Raise a `UserError` if a number is out of its range, or there is a confidence, but no file of boxes."""
        if self.source is None and self.confidence is not None:
            raise UserError(
                f"--box-confidence {self.confidence:g}: applies to --boxes; name a file of boxes, or remove this option"
            )
        if not 0 <= self.margin <= 10:
            raise UserError(f"--box-margin {self.margin:g}: expected a share of the box from 0 to 10, e.g. 0.1")
        if self.confidence is not None and not 0 <= self.confidence <= 1:
            raise UserError(f"--box-confidence {self.confidence:g}: expected a number from 0 to 1, e.g. 0.2")


def boxes_of(source: Path | None, margin: float | None, confidence: float | None) -> Boxes | None:
    """Return options on boxes, checked; None without any."""
    if source is None and margin is None and confidence is None:
        return None
    boxes = Boxes(source, margin or 0.0, confidence)
    boxes.check()
    return boxes


class ImageBox(NamedTuple):
    """Box of an image file."""

    path: str
    box: Box
    label: str | None  # of COCO's categories


class _Found(NamedTuple):
    where: str  # for errors
    name: str  # relative to the folder of the images
    numbers: Four  # left, top, width, height
    is_share: bool  # of the image's width and height, instead of pixels
    label: str | None = None
    confidence: float = 1.0

    def sides(self, width: int, height: int) -> Four:
        """Return left, top, right and bottom in pixels of an image."""
        across, down = (width, height) if self.is_share else (1, 1)
        left, top = self.numbers[0] * across, self.numbers[1] * down
        return left, top, left + self.numbers[2] * across, top + self.numbers[3] * down


def read_boxes(images: Path, boxes: Path, confidence: float | None) -> list[ImageBox]:
    """Read the boxes of an image, or of the images of a folder, in the order of their file.

    Args:
        images: image, or the folder that names in the file of boxes are relative to.
        boxes: a folder with a text file for each image, in the same subfolder and with the same name except for the
            suffix, with lines ``class x y width height [confidence]``, where x and y are the center, as shares of the
            image (YOLO); or a ``.json`` file with ``images``, ``annotations`` and ``categories`` (COCO), whose
            categories are labels; or with ``images`` and their ``detections`` (MegaDetector), of which animals are
            used.
        confidence: boxes with a lower confidence are left out. Default: `LEAST_CONFIDENCE`.

    Raises:
        UserError: a file cannot be read, an image is missing, a box is empty or not inside its image, or there are no
            boxes; see `_refuse`.
    """
    root, least = images if images.is_dir() else images.parent, LEAST_CONFIDENCE if confidence is None else confidence
    faults, found, sizes = list[str](), list[ImageBox](), dict[str, tuple[int, int]]()
    unsure = list[float]()
    for row in _yolo(root, boxes, faults) if boxes.is_dir() else _json(boxes, faults):
        name = inside(root, row.name)
        if name is None:
            faults.append(f"{row.where}: {row.name!r} is outside of {root}; expected a name relative to this folder")
            continue
        path = str(root / name)
        if images != root and path != str(images):
            continue
        if row.confidence < least:
            unsure.append(row.confidence)
            continue
        try:
            if path not in sizes:
                with decoding(path):
                    sizes[path] = upright_size(path)
            found.append(ImageBox(path, fitted(row.sides(*sizes[path]), path, *sizes[path]), row.label))
        except BadImageError as error:
            faults.append(f"{row.where}: {error}")
    _refuse(f"--boxes {boxes}", faults)
    if not found:
        reason = "; expected at least one (of MegaDetector's boxes those of animals are used)"
        if unsure:
            best = f"the surest of {len(unsure):,} has {max(unsure):g}"
            reason = f" of a confidence of at least {least:g}; {best}: lower --box-confidence"
        raise UserError(f"--boxes {boxes}: no boxes of {images}{reason}")
    return found


def check_boxes(dataset: Dataset, source: Path, where: Callable[[int], str]) -> None:
    """Check the boxes of a table against the sizes of their images, by the rule for boxes of other programs.

    A box that exceeds its image by at most a pixel is cut at the border. An image that cannot be read is left to the
    command that reads it.

    Args:
        dataset: images of the table; its ``boxes`` are changed.
        source: the table.
        where: place of a row in the table.

    Raises:
        UserError: a box is not inside its image, see `_refuse`.
    """
    if dataset.boxes is None:
        return
    faults, sizes, boxes = list[str](), dict[str, tuple[int, int] | None](), dataset.boxes.copy()
    for row, path in enumerate(dataset.paths):
        if (box := dataset.box(row)) is None:
            continue
        if path not in sizes:
            sizes[path] = None
            with suppress(BadImageError), decoding(path):
                sizes[path] = upright_size(path)
        left, top, right, bottom = (round(side) for side in box[:4])
        if (size := sizes[path]) is None or (0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]):
            continue  # a box that is inside after rounding keeps its numbers, of which ids of galleries are made
        try:
            boxes[row] = fitted(box[:4], path, *size)[:4]
        except BadImageError as error:
            faults.append(f"{where(row)}: {error}")
    _refuse(str(source), faults)
    dataset.boxes = boxes


def _refuse(source: str, faults: Sequence[str]) -> None:
    """Raise a `UserError` with the first three problems of boxes, and the number of all, if there are any."""
    if len(faults) == 1:
        raise UserError(f"{faults[0]}; correct this entry, or remove it")
    if faults:
        listed = faults[:MOST_LISTED]
        first = "" if len(faults) == len(listed) else f"; the first {len(listed)}"
        raise UserError(
            "\n".join([f"{source}: {len(faults):,} problems; correct these entries, or remove them{first}:", *listed])
        )


def _yolo(root: Path, folder: Path, faults: list[str]) -> Iterator[_Found]:
    """Yield the boxes of text files, sorted by their paths; report lines that are no boxes, and files without image."""
    files = [file for file in sorted(folder.rglob("*.txt")) if file.name != CLASSES]
    if not files:
        raise UserError(f"--boxes {folder}: this folder has no text files; expected one per image, as YOLO writes them")
    for file in files:
        near = (root / file.relative_to(folder)).parent.glob(f"{escape(file.stem)}.*")
        images = sorted(path for path in near if path.stem == file.stem and path.suffix.lower() in EXTENSIONS)
        if not images:
            faults.append(f"{file}: there is no image of this name in {root}")
            continue
        for number, line in enumerate(read_text(file, "--boxes", "no such file or folder").splitlines(), start=1):
            numbers = _numbers(line)
            if len(numbers) not in (5, 6):
                faults.append(
                    f"{file}:{number}: got {excerpt(repr(line))}, expected class x y width height [confidence]"
                )
            else:
                _, x, y, width, height, sure = [*numbers, 1.0][:6]
                sides = x - width / 2, y - height / 2, width, height
                yield _Found(f"{file}:{number}", str(images[0].relative_to(root)), sides, True, confidence=sure)


def _numbers(line: str) -> list[float]:
    """Return the finite numbers of a line; none if a word is not a number."""
    try:
        return [number for word in line.split() if abs(number := float(word)) < 1e9]
    except ValueError:
        return []


class _Image(BaseModel):
    id: Name
    file_name: str


class _Annotation(BaseModel):
    image_id: Name
    category_id: Name | None = None
    bbox: Four | None = None
    score: FiniteFloat = 1.0


class _Category(BaseModel):
    id: Name
    name: str


class _Coco(BaseModel):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category] = []


class _Detection(BaseModel):
    category: str
    conf: Annotated[float, Field(ge=0, le=1)]
    bbox: Four


class _Detected(BaseModel):
    file: str
    detections: list[_Detection] | None = None  # null for a file that it could not read


class _MegaDetector(BaseModel):
    images: list[_Detected]
    detection_categories: dict[str, str] = {}


def _json(file: Path, faults: list[str]) -> Iterator[_Found]:
    """Yield the boxes of a file of COCO's annotations or of MegaDetector; report entries that are none."""
    try:
        data = json.loads(read_text(file, "--boxes", "no such file or folder"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"--boxes {file}: cannot read this JSON file: {error}") from error
    try:
        if isinstance(data, dict) and "annotations" in data:
            yield from _coco(file, _Coco.model_validate(data), faults)
        elif isinstance(data, dict) and "images" in data:
            yield from _megadetector(file, _MegaDetector.model_validate(data))
        else:
            raise UserError(
                f"--boxes {file}: expected an object with images and annotations (COCO) or detections (MegaDetector)"
            )
    except ValidationError as error:
        wrong = dict[str, str]()  # a value that may be a number or text has two errors
        for one in error.errors(include_url=False, include_context=False):
            place = ".".join(str(part) for part in one["loc"] if part not in ("int", "str"))
            wrong.setdefault(place, f"{one['msg'].lower()}, got {excerpt(repr(one['input']))}")
        faults += [f"--boxes {file}: {place}: {fault}" for place, fault in wrong.items()]


def _by_id(where: str, named: Sequence[tuple[Name, str]], faults: list[str]) -> dict[Name, str]:
    """Return names by their ids; report two names with one id."""
    found: dict[Name, str] = {}
    for number, (one, name) in enumerate(named):
        if found.setdefault(one, name) != name:
            faults.append(f"{where}.{number}: id {one!r} is that of {found[one]} and of {name}; expected one id each")
    return found


def _coco(file: Path, data: _Coco, faults: list[str]) -> Iterator[_Found]:
    names = _by_id(f"{file}: images", [(image.id, image.file_name) for image in data.images], faults)
    labels = _by_id(f"{file}: categories", [(category.id, category.name) for category in data.categories], faults)
    if faults:  # which image a box belongs to is unknown
        return
    for number, one in enumerate(data.annotations):
        where = f"{file}: annotations.{number}"
        if one.image_id not in names:
            faults.append(f"{where}: image_id {one.image_id!r} is not one of the images")
        elif one.bbox is not None:
            label = None if one.category_id is None else labels.get(one.category_id)
            yield _Found(where, names[one.image_id], one.bbox, is_share=False, label=label, confidence=one.score)


def _megadetector(file: Path, data: _MegaDetector) -> Iterator[_Found]:
    animals = [number for number, name in data.detection_categories.items() if name == ANIMAL]
    for number, image in enumerate(data.images):
        for place, one in enumerate(image.detections or ()):
            if not animals or one.category in animals:
                where = f"{file}: images.{number}.detections.{place}"
                yield _Found(where, image.file, one.bbox, is_share=True, confidence=one.conf)
