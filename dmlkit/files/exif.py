"""When and where photos were taken, by the EXIF data in their headers, which are read only where something asks."""

import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from math import isfinite
from typing import Any

from PIL import ExifTags

from dmlkit.files.columns import SightingCells
from dmlkit.files.image_file import BadImageError, decoding, opened

TIMES = ((36867, 37521, 36881), (36868, 37522, 36882))
"""Tags of the times at which a photo was taken and digitized, of their fractions of seconds and of their zones."""
MANY = 2000  # photos, from which on a bar is shown: about a second


def exif_sightings(paths: Sequence[str]) -> list[SightingCells]:
    """Return when and where photos were taken, as cells of a table; all are empty for a file that cannot be read.

    A file is read once per process. In a terminal a bar shows the progress over many photos.
    """
    if len(paths) < MANY or not sys.stderr.isatty():
        return [_sighting(path) for path in paths]
    from rich.console import Console
    from rich.progress import track

    return [*map(_sighting, track(paths, "reading EXIF data", console=Console(stderr=True), transient=True))]


@cache
def _sighting(path: str) -> SightingCells:
    with suppress(BadImageError), warnings.catch_warnings(action="ignore"), decoding(path), opened(path) as image:
        exif = image.getexif()
        return sighting_in(exif.get_ifd(ExifTags.IFD.Exif), exif.get_ifd(ExifTags.IFD.GPSInfo))
    return SightingCells()


def sighting_in(tags: dict[int, Any], place: dict[int, Any]) -> SightingCells:
    """Return the time and the place in the tags of EXIF and of GPS; wrong ones are unknown, and so is 0 N 0 E.

    Example:
        >>> sighting_in({36867: "2026:05:31 14:30:00"}, {1: "S", 2: (12.0, 30.0, 0.0), 3: "E", 4: (131.0, 0.0, 0.0)})
        SightingCells(latitude='-12.5', longitude='131', time='2026-05-31T14:30:00')
        >>> sighting_in({36867: "0000:00:00 00:00:00"}, {2: (0.0, 0.0)})
        SightingCells(latitude=None, longitude=None, time=None)
    """
    time = next((text for names in TIMES if (text := _time(*(_text(tags.get(name)) for name in names)))), None)
    latitude, longitude = _degrees(place, 1, "S", 90), _degrees(place, 3, "W", 180)
    if latitude is None or longitude is None or latitude == longitude == 0:
        return SightingCells(None, None, time)
    return SightingCells(f"{latitude:.10g}", f"{longitude:.10g}", time)


def _text(value: Any) -> str:
    return (value.decode("latin-1") if isinstance(value, bytes) else str(value or "")).strip("\0 ")


def _time(text: str, fraction: str, zone: str) -> str | None:
    """Return a time in ISO 8601; None if it is none."""
    match = re.fullmatch(r"(\d{4})\D(\d\d)\D(\d\d)\D(\d\d\D\d\d\D\d\d)", text)
    if match is None:
        return None
    time = f"{match[1]}-{match[2]}-{match[3]}T{re.sub('[^0-9]', ':', match[4])}"
    time += f".{fraction}" if fraction.isdecimal() and fraction.isascii() else ""
    time += zone if re.fullmatch(r"[-+]\d\d:\d\d", zone) else ""
    try:
        return datetime.fromisoformat(time) and time
    except ValueError:
        return None


def _degrees(place: dict[int, Any], tag: int, negative: str, limit: int) -> float | None:
    """Return a side of a place in degrees; None if it is missing or wrong, e.g. of fractions with denominator 0."""
    try:
        degrees, minutes, seconds = (float(part) for part in place[tag + 1])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    value = degrees + minutes / 60 + seconds / 3600
    if not isfinite(value) or not 0 <= value <= limit:
        return None
    return -value if _text(place.get(tag)).upper() == negative else value
