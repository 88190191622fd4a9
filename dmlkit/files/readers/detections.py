"""Output of detectors of animals: MegaDetector and SpeciesNet."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from dmlkit.files.readers.base import ImageTable, Reader, box_of, counted_out, json_at, table_of, validated
from dmlkit.files.readers.coco import Confidence, Four
from dmlkit.files.regular import VIDEOS

ANIMAL = "animal"  # the category that is used, instead of persons and vehicles


class _Detection(BaseModel):
    category: str
    label: str | None = None  # of SpeciesNet
    conf: Confidence
    bbox: Four
    classifications: list[tuple[str, float]] = []


class _Detected(BaseModel):
    file: str
    detections: list[_Detection] | None = None  # null for a file that it could not read
    datetime: str | None = None
    prediction: str | None = None


class _SpeciesNet(_Detected):
    file: str = Field(alias="filepath")


class _MegaDetectorFile(BaseModel):
    images: list[_Detected]
    detection_categories: dict[str, str] = {}
    classification_categories: dict[str, str] = {}


class _SpeciesNetFile(BaseModel):
    predictions: list[_SpeciesNet]


class MegaDetectorReader(Reader):
    """Reader of MegaDetector's JSON: a row per animal, with its box, and its ``species`` if it was classified."""

    title = "MegaDetector"

    def recognizes(self, path: Path) -> bool:
        return path.suffix.lower() == ".json" and path.is_file() and "images" in json_at(path)

    def read(self, path: Path) -> ImageTable:
        faults = list[str]()
        data, numbers = validated(_MegaDetectorFile, json_at(path), path, faults)
        names = data.classification_categories
        animals = {number for number, name in data.detection_categories.items() if name == ANIMAL}
        return _rows(path, "images", data.images, numbers["images"], faults, animals, names)


class SpeciesNetReader(Reader):
    """Reader of SpeciesNet's JSON: a row per animal, with its box and its ``species``."""

    title = "SpeciesNet"

    def recognizes(self, path: Path) -> bool:
        return path.suffix.lower() == ".json" and path.is_file() and "predictions" in json_at(path)

    def read(self, path: Path) -> ImageTable:
        faults = list[str]()
        data, numbers = validated(_SpeciesNetFile, json_at(path), path, faults)
        return _rows(path, "predictions", data.predictions, numbers["predictions"], faults, {"1"}, {})


def _rows(
    path: Path,
    key: str,
    images: list[Any],
    numbers: list[int],
    faults: list[str],
    animals: set[str],
    names: dict[str, str],
) -> ImageTable:
    rows, places, sure = list[dict[str, Any]](), list[str](), list[float]()
    videos = failed = without = others = 0
    for number, image in zip(numbers, images, strict=True):
        if Path(image.file).suffix.lower() in VIDEOS:
            videos += 1
            continue
        if image.detections is None:
            failed += 1
            continue
        kept = [(place, one) for place, one in enumerate(image.detections) if not animals or one.category in animals]
        without += not kept
        others += len(image.detections) - len(kept)
        for place, one in kept:
            best = max(one.classifications, key=lambda pair: pair[1], default=None)
            species = image.prediction and image.prediction.rsplit(";", 1)[-1]
            seen = {"time": image.datetime, "species": names.get(best[0], best[0]) if best else species}
            known = {name: text for name, text in seen.items() if text}
            rows.append({"path": image.file, **known, **box_of(*one.bbox)})
            places.append(f"{path}: {key}.{number}.detections.{place}")
            sure.append(one.conf)
    counts = [
        (videos, "video", "videos"),
        (failed, "image that the detector could not read", "images that the detector could not read"),
        (without, "image without an animal", "images without an animal"),
        (others, "box of a person or vehicle", "boxes of persons or vehicles"),
    ]
    notes = counted_out(path, counts)
    return ImageTable(
        table_of(rows), path, path.parent, places, confidences=sure, is_share=True, faults=faults, notes=notes
    )
