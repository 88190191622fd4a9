"""Annotations of COCO, with boxes or polygons, and of COCO Camera Traps, whose labels are those of whole images."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from dmlkit.errors import UserError, counted
from dmlkit.files.readers.base import ImageTable, Reader, box_of, counted_out, json_at, table_of, validated

Name = int | str
Confidence = Annotated[float, Field(ge=0, le=1)]
Four = tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat]
EMPTY = "empty"  # category of images without an animal in COCO Camera Traps


class _Image(BaseModel):
    model_config = ConfigDict(extra="allow")
    id: Name
    file_name: str


class _Annotation(BaseModel):
    model_config = ConfigDict(extra="allow")
    image_id: Name
    category_id: Name | None = None
    bbox: Annotated[Four | None, BeforeValidator(lambda box: None if box == [] else box)] = None
    segmentation: Any = None
    score: Confidence = 1.0

    @property
    def box(self) -> Four | None:
        """Left, top, width and height: of its polygons if there is no box; None without either."""
        numbers = [number for polygon in _polygons(self.segmentation) for number in polygon]
        if self.bbox is not None or not numbers:
            return self.bbox
        across, down = numbers[::2], numbers[1::2]
        return min(across), min(down), max(across) - min(across), max(down) - min(down)


class _Category(BaseModel):
    id: Name
    name: str


class _Coco(BaseModel):
    images: list[_Image]
    annotations: list[_Annotation] = []  # a list of test images has none
    categories: list[_Category] = []


class CocoReader(Reader):
    """Reader of annotations: a row per box; a row per image if it has annotations without one.

    The category is the label; other values of an image and of an annotation are columns, such as ``seq_id``.
    """

    title = "COCO"

    def recognizes(self, path: Path) -> bool:
        keys = json_at(path).keys() if path.suffix.lower() == ".json" and path.is_file() else set[str]()
        return "annotations" in keys or {"images", "categories"} <= keys

    def read(self, path: Path) -> ImageTable:
        faults = list[str]()
        data, numbers = validated(_Coco, path, faults)
        _by_id(f"{path}: images", [(image.id, image.file_name) for image in data.images])
        labels = _by_id(f"{path}: categories", [(category.id, category.name) for category in data.categories])
        images = {image.id: image for image in data.images}
        boxed = {annotation.image_id for annotation in data.annotations if annotation.box is not None}
        rows, places, sure = list[dict[str, Any]](), list[str](), list[float]()
        empty = without = unknown = 0
        for number, annotation in zip(numbers.get("annotations", []), data.annotations, strict=True):
            where = f"{path}: annotations.{number}"
            label = None if annotation.category_id is None else labels.get(annotation.category_id)
            if annotation.image_id not in images:
                faults.append(f"{where}: image_id {annotation.image_id!r} is not one of the images")
            elif annotation.box is None and label == EMPTY:
                empty += 1
            elif annotation.box is None and annotation.image_id in boxed:
                without += 1
            else:
                image = images[annotation.image_id]
                unknown += bool(labels) and annotation.category_id is not None and label is None
                row = {"path": image.file_name, "label": label} | _others(image) | _others(annotation)
                rows.append(row | (box_of(*annotation.box) if annotation.box is not None else {}))
                places.append(where)
                sure.append(annotation.score)
        unnamed = len(images) - len({annotation.image_id for annotation in data.annotations} & set(images))
        counts = [
            (empty, "image that is labeled empty", "images that are labeled empty"),
            (without, "annotation without a box", "annotations without a box"),
            (unnamed, "image without annotations", "images without annotations"),
        ]
        notes = counted_out(path, counts)
        if unknown:
            annotations = counted(unknown, "annotation")
            notes.append(f"{path}: without a label: {annotations} of a category that it does not list")
        root = path.parent.parent if path.parent.name == "annotations" else path.parent  # images lie next to it
        return ImageTable(table_of(rows), path, root, places, confidences=sure, faults=faults, notes=notes)


def _others(entry: BaseModel) -> dict[str, Any]:
    """Return the values of an entry that a column can hold, except ids and sizes; also those of CVAT's attributes."""
    values = {name: value for name, value in (entry.model_extra or {}).items() if name not in ("id", "width", "height")}
    attributes = values.get("attributes")
    cells = (attributes if isinstance(attributes, dict) else {}) | values
    return {
        name: value
        for name, value in cells.items()
        if isinstance(value, str | int | float) and name not in ("path", "label")
    }


def _polygons(segmentation: Any) -> Iterator[list[float]]:
    """Yield the polygons of an annotation, each x, y, x, y, ...; other masks have none."""
    for polygon in segmentation if isinstance(segmentation, list) else ():
        is_polygon = isinstance(polygon, list) and len(polygon) >= 6 and len(polygon) % 2 == 0
        if is_polygon and all(isinstance(number, int | float) for number in polygon):
            yield polygon


def _by_id(where: str, named: Sequence[tuple[Name, str]]) -> dict[Name, str]:
    """Return names by their ids."""
    names: dict[Name, str] = {}
    for key, name in named:
        if names.setdefault(key, name) != name:
            raise UserError(f"{where}: id {key!r} is that of {names[key]} and of {name}; expected one id each")
    return names
