"""Camtrap DP, the exchange format of camera traps: tables of deployments, media and observations."""

from collections import Counter, defaultdict
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
        folder = path.parent if path.name in (MEDIA, OBSERVATIONS, DEPLOYMENTS, "datapackage.json") else path
        return (folder / MEDIA).is_file() and (folder / OBSERVATIONS).is_file()

    def read(self, path: Path) -> ImageTable:
        folder, faults = path if path.is_dir() else path.parent, list[str]()
        media = {row["mediaID"]: row for _, row in _rows(folder / MEDIA, ("mediaID", "deploymentID", "filePath"))}
        sites = {row["deploymentID"]: row for _, row in _rows(folder / DEPLOYMENTS, ("deploymentID",))}
        lines = _rows(folder / OBSERVATIONS, ("mediaID", "deploymentID", "observationType", "individualID"))
        observations = [(f"{folder / OBSERVATIONS}:{line}", row) for line, row in lines]
        of_media = [(where, row) for where, row in observations if row["mediaID"]]
        missing = [(where, row["mediaID"]) for where, row in of_media if row["mediaID"] not in media]
        faults += [f"{where}: mediaID {medium!r} is not in {MEDIA}" for where, medium in missing]
        seen = [_Seen(where, media[row["mediaID"]], row) for where, row in of_media if row["mediaID"] in media]
        of_events = [*_of_events(folder, observations, media, {record.medium["mediaID"] for record in seen})]
        alone = len(observations) - len(of_media) - len({record.where for record in of_events})
        seen += of_events
        observed = {record.medium["mediaID"] for record in seen}
        animals = [record for record in seen if record.observation["observationType"] == ANIMAL]
        photos = [record for record in animals if not _is_video(record.medium)]
        unique, several, repeated = _unambiguous(photos)
        counts = [
            (len(seen) - len(animals), "observation of no animal", "observations of no animal"),
            (len(animals) - len(photos), "observation in a video", "observations in videos"),
            (alone, "observation of an event without other media", "observations of events without other media"),
            (len(media) - len(observed), "medium without an observation", "media without an observation"),
            (several, "image of several individuals without boxes", "images of several individuals without boxes"),
            (repeated, "repeated observation of an individual", "repeated observations of an individual"),
        ]
        has_names = any(record.observation["individualID"] for record in unique)  # else the user chooses another label
        rows = [_row(record, sites, KEPT if has_names else KEPT[1:]) for record in unique]
        places, notes = [record.where for record in unique], counted_out(folder, counts)
        return ImageTable(table_of(rows), folder, folder, places, is_share=True, faults=faults, notes=notes)


def _rows(file: Path, needs: Sequence[str]) -> list[tuple[int, Cells]]:
    table = read_csv(file, "no such file; Camtrap DP has media.csv, observations.csv and deployments.csv")
    if missing := [name for name in needs if name not in table.names]:
        raise UserError(f"{file}: has no column {missing[0]!r}; expected one of Camtrap DP 1.0")
    return list(table.rows())


def _of_events(
    folder: Path, observations: Sequence[tuple[str, Cells]], media: Mapping[str, Cells], observed: set[str]
) -> Iterator[_Seen]:
    """Yield the observations of events, for each medium of their deployment and time that has none of its own."""
    of_site: dict[str, list[tuple[datetime, Cells]]] = defaultdict(list)
    events = [(where, row) for where, row in observations if not row["mediaID"]]
    for medium in media.values() if events else ():
        if medium["mediaID"] not in observed:
            of_site[medium["deploymentID"]].append((_time(medium, "timestamp", str(folder / MEDIA)), medium))
    for where, event in events:
        start, end = (_time(event, name, where) for name in ("eventStart", "eventEnd"))
        taken = of_site[event["deploymentID"]]
        yield from (_Seen(where, medium, event) for time, medium in taken if start <= time <= end)


def _time(row: Cells, name: str, where: str) -> datetime:
    try:
        time = datetime.fromisoformat(row.get(name, ""))
    except ValueError:
        raise UserError(
            f"{where}: {name}: got {row.get(name)!r}, expected a time such as 2020-05-30T04:57:37Z"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _is_video(medium: Cells) -> bool:
    return medium.get("fileMediatype", "").startswith("video") or Path(medium["filePath"]).suffix.lower() in VIDEOS


def _box(row: Cells) -> tuple[str, ...]:
    return tuple(row.get(name, "") for name in BOX_CELLS)


def _unambiguous(seen: Sequence[_Seen]) -> tuple[list[_Seen], int, int]:
    """Return observations, one per image and box, the number of images of several individuals, and that of repeats.

    Images of several individuals, or species, are not among them.
    """
    names: dict[tuple[str, ...], set[str]] = defaultdict(set)
    species: dict[tuple[str, ...], set[str]] = defaultdict(set)  # of animals without a name
    first: dict[tuple[str, ...], _Seen] = {}
    counts = Counter[tuple[str, ...]]()
    for record in seen:
        key = record.medium["mediaID"], *_box(record.observation)
        name, kind = record.observation["individualID"], record.observation.get("scientificName")
        names[key].add(name)
        if kind and not name:
            species[key].add(kind)
        counts[key] += 1
        first.setdefault(key, record)
    unique = {key: record for key, record in first.items() if max(len(names[key]), len(species[key])) == 1}
    return [*unique.values()], len(first) - len(unique), sum(counts[key] - 1 for key in unique)


def _row(record: _Seen, sites: Mapping[str, Cells], columns: Sequence[str]) -> dict[str, Any]:
    site, cells = sites.get(record.medium["deploymentID"], {}), record.observation
    row: dict[str, Any] = {"path": record.medium["filePath"], "timestamp": record.medium.get("timestamp")}
    row |= {"observationID": cells.get("observationID"), "mediaID": record.medium["mediaID"]}
    row |= {name: cells.get(name) for name in columns} | {side: site.get(side) for side in ("latitude", "longitude")}
    try:
        left, top, width, height = (float(cell) for cell in _box(cells) if cell)
    except ValueError:  # none, or no numbers
        if any(_box(cells)):
            raise UserError(f"{record.where}: got the box {_box(cells)}, expected four numbers from 0 to 1") from None
        return {name: cell or None for name, cell in row.items()}
    return {name: cell or None for name, cell in row.items()} | box_of(left, top, width, height)
