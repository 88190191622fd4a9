"""Files of annotation tools that export a format that is read: refused with the name of that export."""

import re
from pathlib import Path

from dmlkit.errors import UserError
from dmlkit.files.csv_table import USUAL, key_of
from dmlkit.files.readers.base import ImageTable, Reader, start_of

WAYS = {
    "COCO results": "give COCO annotations, with images, annotations and categories",
    "Label Studio": "export it as COCO or Pascal VOC XML",
    "CVAT": "export it as COCO 1.0 or Pascal VOC 1.1",
    "Create ML": "export it as COCO or Pascal VOC",
    "labelme": "convert its folder to COCO, e.g. with labelme2coco",
    "the VGG Image Annotator": "export it with Annotation, Export as COCO",
}


class OtherToolReader(Reader):
    """Reader that recognizes files of other tools, to say which export to choose."""

    title = "other tools"

    def recognizes(self, path: Path) -> bool:
        return path.suffix.lower() in (".json", ".xml", ".csv") and path.is_file() and _tool(path) is not None

    def read(self, path: Path) -> ImageTable:
        tool = _tool(path) or ""
        raise UserError(f"{path}: this is a file of {tool}, which lists no images for dmlkit; {WAYS[tool]}")


def _tool(path: Path) -> str | None:
    """Return the tool that wrote a file; None if it is not known."""
    start = start_of(path).decode(errors="replace")
    if path.suffix.lower() == ".csv":
        return "the VGG Image Annotator" if "region_shape_attributes" in start else None
    if path.suffix.lower() == ".xml":
        return "CVAT" if "<annotations>" in start else None
    if start.lstrip().startswith("["):
        if re.search(r'"annotations?"\s*:\s*\[\s*\{[^\]]*"coordinates"\s*:\s*\{', start):
            return "Create ML"
        if "/data/upload/" in start or "/data/local-files/" in start or re.search(r'"annotations"\s*:\s*\[', start):
            return "Label Studio"
        has_path = any(key_of(name) in ("path", *USUAL["path"]) for name in re.findall(r'"([^"]*)"\s*:', start))
        return "COCO results" if '"image_id"' in start and '"bbox"' in start and not has_path else None
    if '"_via_' in start or ('"file_attributes"' in start and '"regions"' in start):  # or its annotations alone
        return "the VGG Image Annotator"
    return "labelme" if '"shapes"' in start and '"flags"' in start else None
