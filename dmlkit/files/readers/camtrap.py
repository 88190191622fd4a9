"""Camtrap DP, the exchange format of camera traps: tables of deployments, media and observations."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from dmlkit.errors import UserError
from dmlkit.files.csv_table import read_csv
from dmlkit.files.readers.base import ImageTable, Reader, box_of, counted_out, table_of
from dmlkit.files.regular import VIDEOS

MEDIA, OBSERVATIONS, DEPLOYMENTS = "media.csv", "observations.csv", "deployments.csv"
BOX_CELLS = ("bboxX", "bboxY", "bboxWidth", "bboxHeight")  # shares of the image
KEPT = ("individualID", "eventID", "scientificName", "lifeStage", "sex", "behavior", "deploymentID")
"""Columns of observations that are kept."""
ANIMAL = "animal"
Cells = dict[str, str]


class _Seen(NamedTuple):
    where: str
    medium: Cells
    observation: Cells


class CamtrapReader(Reader):
    """Reader of the folder, or of one of its files: a row per observation of an animal.

    The label is ``individualID`` and the group ``eventID``; time and place are those of the medium and its deployment.
    An observation of a whole event is one of each of its media that has none of its own.
    """

    title = "Camtrap DP"

    def recognizes(self, path: Path) -> bool:
        home = path.parent if path.name in (MEDIA, OBSERVATIONS, DEPLOYMENTS, "datapackage.json") else path
        return (home / MEDIA).is_file() and (home / OBSERVATIONS).is_file()

    def read(self, path: Path) -> ImageTable:
        home, faults = path if path.is_dir() else path.parent, list[str]()
        media = {one["mediaID"]: one for _, one in _rows(home / MEDIA, ("mediaID", "deploymentID", "filePath"))}
        sites = {one["deploymentID"]: one for _, one in _rows(home / DEPLOYMENTS, ("deploymentID",))}
        lines = _rows(home / OBSERVATIONS, ("mediaID", "deploymentID", "observationType", "individualID"))
        observations = [(f"{home / OBSERVATIONS}:{line}", one) for line, one in lines]
        of_media = [(where, one) for where, one in observations if one["mediaID"]]
        missing = [(where, one["mediaID"]) for where, one in of_media if one["mediaID"] not in media]
        faults += [f"{where}: mediaID {medium!r} is not in {MEDIA}" for where, medium in missing]
        seen = [_Seen(where, media[one["mediaID"]], one) for where, one in of_media if one["mediaID"] in media]
        seen += _of_events(home, observations, media, {one.medium["mediaID"] for one in seen})
        observed = {one.medium["mediaID"] for one in seen}
        animals = [one for one in seen if one.observation["observationType"] == ANIMAL]
        photos = [one for one in animals if not _is_video(one.medium)]
        kept, several = _unambiguous(photos)
        counts = [
            (len(seen) - len(animals), "observation of no animal", "observations of no animal"),
            (len(animals) - len(photos), "observation in a video", "observations in videos"),
            (len(media) - len(observed), "medium without an observation", "media without an observation"),
            (several, "image of several individuals without boxes", "images of several individuals without boxes"),
        ]
        has_names = any(one.observation["individualID"] for one in kept)  # else the user chooses another label
        rows = [_row(one, sites, KEPT if has_names else KEPT[1:]) for one in kept]
        places, notes = [one.where for one in kept], counted_out(home, counts)
        return ImageTable(table_of(rows), home, home, places, is_share=True, faults=faults, notes=notes)


def _rows(file: Path, needs: Sequence[str]) -> list[tuple[int, Cells]]:
    table = read_csv(file, "no such file; Camtrap DP has media.csv, observations.csv and deployments.csv")
    if missing := [name for name in needs if name not in table.names]:
        raise UserError(f"{file}: has no column {missing[0]!r}; expected one of Camtrap DP 1.0")
    return list(table.rows())


def _of_events(
    home: Path, observations: Sequence[tuple[str, Cells]], media: Mapping[str, Cells], observed: set[str]
) -> Iterator[_Seen]:
    """Yield the observations of events, for each medium of their deployment and time that has none of its own."""
    of_site: dict[str, list[tuple[datetime, Cells]]] = defaultdict(list)
    events = [(where, one) for where, one in observations if not one["mediaID"]]
    for one in media.values() if events else ():
        if one["mediaID"] not in observed:
            of_site[one["deploymentID"]].append((_time(one, "timestamp", str(home / MEDIA)), one))
    for where, one in events:
        start, end = (_time(one, name, where) for name in ("eventStart", "eventEnd"))
        yield from (_Seen(where, medium, one) for time, medium in of_site[one["deploymentID"]] if start <= time <= end)


def _time(one: Cells, name: str, where: str) -> datetime:
    try:
        time = datetime.fromisoformat(one.get(name, ""))
    except ValueError:
        raise UserError(
            f"{where}: {name}: got {one.get(name)!r}, expected a time such as 2020-05-30T04:57:37Z"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _is_video(medium: Cells) -> bool:
    return medium.get("fileMediatype", "").startswith("video") or Path(medium["filePath"]).suffix.lower() in VIDEOS


def _box(one: Cells) -> tuple[str, ...]:
    return tuple(one.get(name, "") for name in BOX_CELLS)


def _unambiguous(seen: Sequence[_Seen]) -> tuple[list[_Seen], int]:
    """Return observations, one per image and box, without images of several individuals, and the number of these."""
    names: dict[tuple[str, ...], set[str]] = defaultdict(set)
    first: dict[tuple[str, ...], _Seen] = {}
    for one in seen:
        key = one.medium["mediaID"], *_box(one.observation)
        names[key].add(one.observation["individualID"])
        first.setdefault(key, one)
    kept = [one for key, one in first.items() if len(names[key]) == 1]
    return kept, len(first) - len(kept)


def _row(one: _Seen, sites: Mapping[str, Cells], kept: Sequence[str]) -> dict[str, Any]:
    site, cells = sites.get(one.medium["deploymentID"], {}), one.observation
    row: dict[str, Any] = {"path": one.medium["filePath"], "timestamp": one.medium.get("timestamp")}
    row |= {"observationID": cells.get("observationID"), "mediaID": one.medium["mediaID"]}
    row |= {name: cells.get(name) for name in kept} | {side: site.get(side) for side in ("latitude", "longitude")}
    try:
        left, top, width, height = (float(cell) for cell in _box(cells) if cell)
    except ValueError:  # none, or no numbers
        if any(_box(cells)):
            raise UserError(f"{one.where}: got the box {_box(cells)}, expected four numbers from 0 to 1") from None
        return {name: cell or None for name, cell in row.items()}
    return {name: cell or None for name, cell in row.items()} | box_of(left, top, width, height)
