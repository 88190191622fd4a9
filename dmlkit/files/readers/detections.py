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


class _File(BaseModel):
    images: list[_Detected] = []
    predictions: list[_SpeciesNet] = []
    detection_categories: dict[str, str] = {}
    classification_categories: dict[str, str] = {}


class MegaDetectorReader(Reader):
    """Reader of MegaDetector's JSON: a row per animal, with its box, and its ``species`` if it was classified."""

    title, key = "MegaDetector", "images"

    def recognizes(self, path: Path) -> bool:
        return path.suffix.lower() == ".json" and path.is_file() and self.key in json_at(path)

    def read(self, path: Path) -> ImageTable:
        rows, places, sure, faults = list[dict[str, Any]](), list[str](), list[float](), list[str]()
        data, numbers = validated(_File, path, faults)
        animals = {number for number, name in data.detection_categories.items() if name == ANIMAL}
        animals, names = animals if self.key == "images" else {"1"}, data.classification_categories
        videos = failed = without = others = 0
        for number, image in zip(numbers[self.key], getattr(data, self.key), strict=True):
            if Path(image.file).suffix.lower() in VIDEOS:
                videos += 1
                continue
            if image.detections is None:
                failed += 1
                continue
            seen = enumerate(image.detections)
            detected = [(index, detection) for index, detection in seen if not animals or detection.category in animals]
            without += not detected
            others += len(image.detections) - len(detected)
            for index, detection in detected:
                best = max(detection.classifications, key=lambda pair: pair[1], default=None)
                species = image.prediction and image.prediction.rsplit(";", 1)[-1]
                known = {"time": image.datetime, "species": names.get(best[0], best[0]) if best else species}
                cells = {name: text for name, text in known.items() if text}
                rows.append({"path": image.file, **cells, **box_of(*detection.bbox)})
                places.append(f"{path}: {self.key}.{number}.detections.{index}")
                sure.append(detection.conf)
        counts = [
            (videos, "video", "videos"),
            (failed, "image that the detector could not read", "images that the detector could not read"),
            (without, "image without an animal", "images without an animal"),
            (others, "box of a person or vehicle", "boxes of persons or vehicles"),
        ]
        notes, table = counted_out(path, counts), table_of(rows)
        return ImageTable(table, path, path.parent, places, None, sure, is_share=True, faults=faults, notes=notes)


class SpeciesNetReader(MegaDetectorReader):
    """Reader of SpeciesNet's JSON: a row per animal, with its box and its ``species``."""

    title, key = "SpeciesNet", "predictions"
