"""Boxes of images: YOLO's text files, COCO's annotations, MegaDetector's output, and the check of those of tables."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import fitted, upright_size
from dmlkit.datasets.files.paths import are_of_windows, inside
from dmlkit.errors import UserError, merged
from dmlkit.files.escape import excerpt
from dmlkit.files.image_file import BadImageError, Box, decoding
from dmlkit.files.regular import EXTENSIONS, TABLES, read_text

LEAST_CONFIDENCE = 0.2  # of a detected box
ANIMAL = "animal"  # the category of MegaDetector that is used, instead of persons and vehicles
CLASSES = "classes.txt"  # names of YOLO's classes, in the folder of its labels
Name = int | str
Confidence = Annotated[float, Field(ge=0, le=1)]
Four = tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat]


class Boxes(NamedTuple):
    """Options on the boxes of images."""

    source: Path | None = None
    """Folder of YOLO's text files, or a JSON file of COCO's annotations or of MegaDetector. None: a table has boxes."""
    margin: float = 0.0
    """Margin on each side, as a share of the box's width or height; it ends at the border of the image."""
    confidence: float | None = None
    """Boxes of ``source`` that a detector is less sure of are left out. Default: 0.2."""
    skips: bool = False
    """Leave out entries of ``source`` that are wrong, as images that cannot be read, instead of refusing them."""

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


def read_boxes(images: Path, options: Boxes) -> tuple[list[ImageBox], list[str]]:
    """Read the boxes of an image, or of the images of a folder, in the order of their file.

    Args:
        images: image, or the folder that names in the file of boxes are relative to.
        options: ``source`` is a folder with a text file for each image, in the same subfolder and with the same name
            except for the suffix, with lines ``class x y width height [confidence]``, where x and y are the center, as
            shares of the image (YOLO); or a ``.json`` file with ``images``, ``annotations`` and ``categories`` (COCO),
            whose categories are labels; or with ``images`` and their ``detections`` (MegaDetector), of which animals
            are used.

    Returns:
        The boxes, and a message per entry that was left out, because it is malformed, its image is missing, or its box
        is empty or not inside the image.

    Raises:
        UserError: a file cannot be read, entries are wrong and not to be left out, or there are no boxes.
    """
    assert options.source is not None
    boxes, root = options.source, images if images.is_dir() else images.parent
    least = LEAST_CONFIDENCE if options.confidence is None else options.confidence
    faults, found, sizes = list[str](), list[ImageBox](), dict[str, tuple[int, int]]()
    unsure = list[float]()
    rows = list(_yolo(root, boxes, faults) if boxes.is_dir() else _json(boxes, faults))
    is_of_windows = are_of_windows((row.name for row in rows), root)
    for row in rows:
        name = inside(root, row.name.replace("\\", "/") if is_of_windows else row.name)
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
    if not options.skips or not found:
        _refuse(f"--boxes {boxes}", faults, "remove them" if options.skips else "skip them with --skip-bad-images")
    if not found:
        reason = "; expected at least one (of MegaDetector's boxes those of animals are used)"
        if unsure:
            best = f"the surest of {len(unsure):,} has {max(unsure):g}"
            reason = f" of a confidence of at least {least:g}; {best}: lower --box-confidence"
        raise UserError(f"--boxes {boxes}: no boxes of {images}{reason}")
    return found, faults


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


def _refuse(source: str, faults: Sequence[str], way: str = "remove them") -> None:
    """Raise a `UserError` with a line per kind of problem of boxes, if there are any."""
    lines = merged(faults)
    if len(lines) == 1:
        raise UserError(f"{lines[0]}; correct such entries, or {way}")
    if lines:
        raise UserError("\n".join([f"{source}: {len(faults):,} entries are wrong; correct them, or {way}:", *lines]))


def _yolo(root: Path, folder: Path, faults: list[str]) -> Iterator[_Found]:
    """Yield the boxes of text files, sorted by their paths; report lines that are no boxes, and files without image."""
    files = [file for file in sorted(folder.rglob("*.txt")) if file.name != CLASSES]
    if not files:
        raise UserError(f"--boxes {folder}: this folder has no text files; expected one per image, as YOLO writes them")
    for file in files:
        near = (root / file.relative_to(folder)).parent.glob(f"{escape(file.stem)}.*")
        images = sorted(path for path in near if path.stem == file.stem and path.suffix.lower() in EXTENSIONS)
        if len(images) != 1:
            names = " and ".join(path.name for path in images)
            faults.append(
                f"{file}: is of {names}; expected one image of this name: move or rename the others"
                if images
                else f"{file}: there is no image of this name in {root}"
            )
            continue
        for number, line in enumerate(read_text(file, "--boxes", "no such file or folder").splitlines(), start=1):
            numbers = _numbers(line)
            if len(numbers) not in (5, 6):
                faults.append(
                    f"{file}:{number}: got {excerpt(repr(line))}, expected class x y width height [confidence]"
                )
            else:
                _, x, y, width, height, sure = [*numbers, 1.0][:6]
                if not 0 <= sure <= 1:
                    raise UserError(
                        f"{file}:{number}: got the confidence {sure:g}, expected 0 to 1; if it is the number of a "
                        "track, write tracks with confidences (Ultralytics: save_conf=True), or without their numbers"
                    )
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
    score: Confidence = 1.0


class _Category(BaseModel):
    id: Name
    name: str


class _Coco(BaseModel):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category] = []


class _Detection(BaseModel):
    category: str
    conf: Confidence
    bbox: Four


class _Detected(BaseModel):
    file: str
    detections: list[_Detection] | None = None  # null for a file that it could not read


class _MegaDetector(BaseModel):
    images: list[_Detected]
    detection_categories: dict[str, str] = {}


def _json(file: Path, faults: list[str]) -> Iterator[_Found]:
    """Yield the boxes of a file of COCO's annotations or of MegaDetector; report entries that are none."""
    if file.suffix.lower() in NO_JSON:
        raise UserError(
            f"--boxes {file}: expected a folder of YOLO's text files, or a .json file of COCO or MegaDetector; boxes "
            "of a table are read if IMAGES is the table, and those of other formats from an export as COCO"
        )
    try:
        data: Any = json.loads(read_text(file, "--boxes", "no such file or folder"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"--boxes {file}: cannot read this JSON file: {error}") from error
    if isinstance(data, dict) and "annotations" in data:
        yield from _coco(file, *_valid(_Coco, data, file, faults), faults)
    elif isinstance(data, dict) and "images" in data:
        yield from _megadetector(file, *_valid(_MegaDetector, data, file, faults))
    else:
        raise UserError(
            f"--boxes {file}: expected an object with images and annotations (COCO) or detections (MegaDetector)"
        )


NO_JSON = (*TABLES, ".xml", ".txt", ".yaml")
Numbers = dict[str, list[int]]  # of the entries of each list that are left


Content = TypeVar("Content", bound=BaseModel)


def _valid(kind: type[Content], data: dict[str, Any], file: Path, faults: list[str]) -> tuple[Content, Numbers]:
    """Return a file's content without the entries of its lists that are none, which are reported, one line each.

    Raises:
        UserError: something else is wrong.
    """
    wrong = dict[tuple[str, int], str]()
    try:
        found = kind.model_validate(data)
    except ValidationError as error:
        for one in error.errors(include_url=False, include_context=False):
            place = ".".join(str(part) for part in one["loc"] if part not in ("int", "str"))
            fault = f"--boxes {file}: {place}: {one['msg'].lower()}, got {excerpt(repr(one['input']))}"
            match one["loc"]:
                case (str(name), int(number), *_):
                    wrong.setdefault((name, number), fault)
                case _:
                    raise UserError(fault) from None
        faults += wrong.values()
        lists = {name for name, _ in wrong}
        kept = {name: [one for place, one in enumerate(data[name]) if (name, place) not in wrong] for name in lists}
        found = kind.model_validate(data | kept)
    numbers = {
        name: [place for place in range(len(entries)) if (name, place) not in wrong]
        for name, entries in data.items()
        if isinstance(entries, list)
    }
    return found, numbers


def _by_id(where: str, named: Sequence[tuple[Name, str]]) -> dict[Name, str]:
    """Return names by their ids.

    Raises:
        UserError: two names have one id, so that it is unknown which image or category a box belongs to.
    """
    found: dict[Name, str] = {}
    for one, name in named:
        if found.setdefault(one, name) != name:
            raise UserError(f"{where}: id {one!r} is that of {found[one]} and of {name}; expected one id each")
    return found


def _coco(file: Path, data: _Coco, numbers: Numbers, faults: list[str]) -> Iterator[_Found]:
    names = _by_id(f"{file}: images", [(image.id, image.file_name) for image in data.images])
    labels = _by_id(f"{file}: categories", [(category.id, category.name) for category in data.categories])
    for number, one in zip(numbers["annotations"], data.annotations, strict=True):
        where = f"{file}: annotations.{number}"
        if one.image_id not in names:
            faults.append(f"{where}: image_id {one.image_id!r} is not one of the images")
        elif one.bbox is not None:
            label = None if one.category_id is None else labels.get(one.category_id)
            yield _Found(where, names[one.image_id], one.bbox, is_share=False, label=label, confidence=one.score)


def _megadetector(file: Path, data: _MegaDetector, numbers: Numbers) -> Iterator[_Found]:
    animals = [number for number, name in data.detection_categories.items() if name == ANIMAL]
    for number, image in zip(numbers["images"], data.images, strict=True):
        for place, one in enumerate(image.detections or ()):
            if not animals or one.category in animals:
                where = f"{file}: images.{number}.detections.{place}"
                yield _Found(where, image.file, one.bbox, is_share=True, confidence=one.conf)
