"""Labels of images among labeled images, or none of them: ``dmlkit identify``."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmlkit.datasets.files.boxes import Boxes
from dmlkit.errors import UserError, counted, some_of
from dmlkit.files.columns import LABEL, text_column
from dmlkit.files.csv_table import column_called, own_column
from dmlkit.files.escape import command_word
from dmlkit.files.labels import UNKNOWN, label_of
from dmlkit.files.regular import is_video
from dmlkit.files.where import Where
from dmlkit.gallery.folder import GalleryFolder, gallery_of
from dmlkit.gallery.sources import open_queries, path_of
from dmlkit.identify.answers import NEAREST, Answer, Answers, Decision, Identified, Sigmoid, are_nearest, known_labels
from dmlkit.identify.calibration import MORE_IMAGES, SECOND_IMAGE, SIZES, Fit, Identification, lacks_absent
from dmlkit.identify.decisions import Decider, labeled_decider
from dmlkit.identify.probability import estimate_probability
from dmlkit.identify.rule import NEAREST_IMAGE, LabelRule
from dmlkit.identify.search import LocalMatches, nearest, open_searched
from dmlkit.nearest.near_pairs import check_reachable
from dmlkit.nearest.search import QUERY_ROWS, Neighbors
from dmlkit.run_folder.threshold import threshold_value
from dmlkit.vectors.fusion import OWN_MODEL, ModelChoice
from dmlkit.vectors.images import FOLDER, NONE, query_table
from dmlkit.vectors.points import PointSet, in_memory, of_other_model
from dmlkit.vectors.progress_bar import Bar, no_bar

STALE = 0.1  # share of the images that may change before a calibration is called old


def identify(
    source: Path,
    images: Path | Sequence[Path],
    *,
    rule: LabelRule = NEAREST_IMAGE,
    boxes: Boxes | None = None,
    model: ModelChoice = OWN_MODEL,
    labels: Path | None = None,
    manifold: str | None = None,
    bar: Bar = no_bar,
) -> Identified:
    """Find the label of each image among labeled images, or of each group of images, or report it as unknown.

    The probability of a guess is estimated from its margin and score, see `estimate_probability`. In a gallery that was
    calibrated, it is that of the calibration, and an image is `UNKNOWN` if it is too low; after `calibrate_by_value` an
    image, or a group with one value, is compared with the images of this value alone, by their calibration. In a
    gallery with local features the matches of the 100 nearest images count.

    Args:
        source: a gallery, or other labeled points, see `open_points`.
        images: what to identify, see `open_queries`. The frames of a video are a group.
        boxes: boxes of the images, each of which gets an answer, see `images_at`; and conditions on the source, whose
            calibration is the one for these conditions.

    Raises:
        UserError: the source has no image with a label, or the queries come from another model, or a group has images
            of two known labels.
    """
    path = path_of(images)
    rule.check()  # before anything is embedded
    if rule.by is None and is_video(path):
        if rule.method == "vote":
            raise UserError(f"--method vote: {path} is a video, whose frames are a group; use --method nearest")
        rule = replace(rule, by=FOLDER)
    opened = open_searched(source, model, bar, labels=labels, manifold=manifold, where=boxes and boxes.where)
    second = LocalMatches.of(opened)
    if rule.threshold is not None and second is None:  # scores with matches of patches have no bound
        check_reachable(opened.manifold, rule.threshold)
    identifier = Identifier(opened, rule, second)
    query_points = open_queries(images, opened, boxes=boxes, local=True, model=model, bar=bar)
    known = list(known_labels(path, query_points.paths, query_points.labels, identifier.names))
    groups = None if rule.by is None else group_rows(path, query_points, rule.by, known, boxes)
    units = [[row] for row in range(len(query_points))] if groups is None else list(groups.values())
    column, gallery = identifier.column, identifier.gallery
    values = None if column is None else _values(path, query_points, column, boxes)
    if column is None or gallery is None or values is None:
        numbers = None if second is None else second.ask(query_points, model, bar=bar)
        identified = identifier.answers(query_points, known, groups, numbers)
        if column is not None:
            note = f"the thresholds per {column} do not apply: {path} is no table with this column"
            identified = replace(identified, note="; ".join(filter(None, [identified.note, note])))
    else:
        points, names = in_memory(query_points), list(groups or ())

        def answers(searched: GalleryFolder, indices: Sequence[int]) -> Identified:
            second = LocalMatches.of(searched)
            limited, rows = Identifier(searched, rule, second), [row for index in indices for row in units[index]]
            positions = iter(range(len(rows)))
            named = {names[index]: list(islice(positions, len(units[index]))) for index in indices} if groups else None
            right = [known[row] if known[row] in limited.names else None for row in rows]
            numbers = None if second is None else second.ask(query_points, model, torch.tensor(rows), bar)
            identified = limited.answers(points.part(torch.tensor(rows)), right, named, numbers)
            neighbors = identified.neighbors
            gallery_rows = torch.tensor(searched.rows)[limited.decider.numbers[neighbors.rows]]
            return replace(identified, neighbors=replace(neighbors, searched=gallery, rows=gallery_rows))

        identified = _answers_by_value(gallery, column, [{values[row] for row in rows} for rows in units], answers)
    table_rows = _table_rows(query_points)
    return replace(identified, table_rows=[[table_rows[row] for row in rows] for rows in units] if table_rows else ())


def _values(images: Path, query_points: PointSet, column: str, boxes: Boxes | None) -> list[str | None] | None:
    """Return the values (N,) of images in a column of their table; None if they are of no table that has it."""
    table = query_table(images, boxes) if (numbers := _table_rows(query_points)) else None
    if table is None:
        return None
    names = table.table.column_names
    index = column_called(names, column, str(images))
    if index is None:
        return None
    cells = text_column(table.table, str(images), names[index]).to_pylist()
    return [label_of(cells[number]) for number in numbers]


def _table_rows(query_points: PointSet) -> list[int]:
    """Return the row (N,) of each query in the table that lists them; an empty list if none does."""
    images = query_points.images
    numbers = () if images is None else images.dataset.table_rows
    return [numbers[row] for row in images.rows.tolist()] if images is not None and numbers else []


def group_rows(
    images: Path, asked: PointSet, by: str, known: Sequence[str | None], boxes: Boxes | None = None
) -> dict[str, list[int]]:
    """Return the rows of each group of images, in the order in which the groups come first; see `_group_names`."""
    groups: dict[str, list[int]] = {}
    for row, name in enumerate(_group_names(images, asked, by, boxes)):
        groups.setdefault(name, []).append(row)
    for name, rows in groups.items():
        labels = sorted({label for row in rows if (label := known[row]) is not None})
        if len(labels) > 1:
            raise UserError(
                f"--by {by}: the group {name} has images of {labels[0]!r} and of {labels[1]!r}; expected images of "
                "one label in each group"
            )
    return groups


def _group_names(images: Path, query_points: PointSet, by: str, boxes: Boxes | None) -> list[str]:
    """Return the name of each image's group.

    With ``folder`` it is the folder of the image; else its cell in a column of a table of images, in which a blank one
    makes an image a group of its own.
    """
    is_array = query_points.manifest is None
    if by == FOLDER and not is_array:
        return [str(Path(path).parent) for path in query_points.paths]
    numbers = _table_rows(query_points)
    table = query_table(images, boxes, None if by == LABEL else NONE) if numbers else None
    if table is None:
        if is_array:
            raise UserError(f"--by {by}: the rows of {images} have no folders or columns; remove this option")
        raise UserError(f"--by {by}: {images} is no table and has no columns; use {FOLDER}")
    names = table.table.column_names
    column = text_column(table.table, str(images), names[own_column(names, by, str(images))]).to_pylist()
    cells = [column[number] for number in numbers]
    return [cell or path for cell, path in zip(cells, query_points.paths, strict=True)]


def decide_groups(
    decider: Decider, asked: PointSet, groups: Sequence[Sequence[int]], numbers: Tensor | None
) -> list[Decision]:
    """Decide on groups of images, given by their rows, those with equally many at once."""
    decided: dict[int, Decision] = {}
    for size in {len(rows) for rows in groups}:
        indices = torch.tensor([index for index, rows in enumerate(groups) if len(rows) == size])
        for part in indices.split(max(1, QUERY_ROWS // size)):
            rows = torch.tensor([groups[index] for index in part.tolist()])
            rows = rows[:, 0] if size == 1 else rows
            points = asked.points_at(rows.flatten()).reshape(*rows.shape, -1)
            decisions = decider.decide(points, numbers=None if numbers is None else numbers[rows])
            decided.update(zip(part.tolist(), decisions, strict=True))
    return [decided[index] for index in range(len(groups))]


def neighbors_of_groups(near: Answers, groups: dict[str, list[int]]) -> Answers:
    """Return the nearest pictures of each group: those that are the most similar to any of its images."""
    similarities, nearest = torch.empty(len(groups), near.k), torch.empty(len(groups), near.k, dtype=torch.int64)
    for index, rows in enumerate(groups.values()):
        ranked = near.similarities[rows].flatten().sort(descending=True, stable=True)
        pictures = near.rows[rows].flatten()[ranked.indices]
        best = dict[int, float]()
        for picture, similarity in zip(pictures.tolist(), ranked.values.tolist(), strict=True):
            best.setdefault(picture, similarity)
        nearest[index] = torch.tensor(list(best)[: near.k])
        similarities[index] = torch.tensor(list(best.values())[: near.k])
    first = [near.pictures[rows[0]] for rows in groups.values()]
    named = {"queries": list(groups), "pictures": first, "boxes": [None] * len(groups)}
    return replace(near, **named, similarities=similarities, rows=nearest)


def _answers_by_value(
    gallery: GalleryFolder,
    column: str,
    values: Sequence[set[str | None]],
    answers: Callable[[GalleryFolder, Sequence[int]], Identified],
) -> Identified:
    """Answer images, or groups, with one value by the gallery's images of it, if they are enough and were calibrated.

    Args:
        values: those of each image or group.
        answers: answers some of them by a part of the gallery.
    """
    cells = [label_of(cell) for cell in gallery.cells().get(column, [])]
    searched, without = dict[str | None, GalleryFolder](), Counter[str]()
    for value in sorted({value for unit_values in values for value in unit_values if value is not None}):
        rows = [row for row, cell in enumerate(cells) if cell == value]
        if sum(gallery.labels[row] is not None for row in rows) < NEAREST:  # each answer lists so many images
            continue
        if Identification.of(part := gallery.limited(Where.of_value(column, value), rows)) is not None:
            searched[value] = part
    by_value = dict[str | None, list[int]]()
    for index, unit_values in enumerate(values):
        value = next(iter(unit_values)) if len(unit_values) == 1 else None
        if value not in searched:
            without[", ".join(sorted(name or f"no {column}" for name in unit_values))] += 1
        by_value.setdefault(value if value in searched else None, []).append(index)
    parts = [answers(searched.get(value, gallery), indices) for value, indices in by_value.items()]
    neighbors, order = [part.neighbors for part in parts], [index for indices in by_value.values() for index in indices]
    lists: dict[str, Any] = {
        name: [item for part in neighbors for item in getattr(part, name)] for name in ("queries", "pictures", "boxes")
    }
    tensors = {name: torch.cat([getattr(part, name) for part in neighbors]) for name in ("similarities", "rows")}
    compared, total = f"{len(order) - without.total():,}", counted(len(order), *parts[0].unit)
    note = f"{compared} of {total} compared with the images of their own {column} alone, by its threshold"
    if without:
        others = some_of([f"{value} ({count:,})" for value, count in sorted(without.items())])
        note += f", the others with all images, by the common one: {others}"
    identified = replace(
        parts[0],
        answers=[answer for part in parts for answer in part.answers],
        neighbors=replace(neighbors[0], **lists, **tensors),
        note="; ".join(dict.fromkeys([note, *(part.note for part in parts if part.note)])),
        in_source=sum(part.in_source for part in parts),
    )
    return identified.at(sorted(range(len(order)), key=order.__getitem__))


class Identifier:
    """Labeled points that decide on the labels of others, see `identify`."""

    def __init__(self, searched: PointSet, rule: LabelRule = NEAREST_IMAGE, second: LocalMatches | None = None) -> None:
        self.threshold, self.is_own_threshold = rule.threshold, rule.threshold is not None  # chosen for these queries
        self.source, self.gallery = searched, gallery_of(searched)
        self.names, self.decider = labeled_decider(searched, rule.method, rule.k, second=second)
        self.searched, self.unlabeled = self.decider.searched, len(searched) - len(self.decider.codes)
        self.fits, self.estimated = dict[int, Fit](), dict[int, Sigmoid | None]()  # by the size of a group
        self.note, self.column, calibration = None, None, None
        if self.gallery is not None:
            calibration = Identification.of(self.gallery)
            if self.threshold is None and self.gallery.manifest.threshold_is_own:
                self.threshold = self.gallery.manifest.threshold
        if calibration is not None:
            compared = self.decider.similarity_name
            self.fits = {fit.size: fit for fit in calibration.fits if fit.similarity == compared}
        if self.gallery is not None and calibration is not None and self.fits:
            self.note = _note_of_changes(self.gallery, calibration)
            self.column = calibration.column if self.threshold is None else None  # whose values were calibrated
        elif self.threshold is None:
            if second is None:  # a threshold for pairs is one of points alone
                self.threshold = self._pair_threshold()
            self.note = self._advice()

    def answers(
        self,
        asked: PointSet,
        known: Sequence[str | None],
        groups: dict[str, list[int]] | None = None,
        numbers: Tensor | None = None,
    ) -> Identified:
        """Return the answers on points, or on groups of them.

        Args:
            known: (N,) the correct label of each point, None where it is not known.
            groups: rows of the points of each group, by its name.
            numbers: (N,) the numbers of their images, with a second similarity.
        """
        length = self.decider.length if groups is None else NEAREST
        neighbors = nearest(self.searched, asked, length, rescored=self.decider.rescored, numbers=numbers)
        in_source = are_nearest(neighbors)
        if asked.source != self.source.source:  # the rows of two files without paths have the same names
            pairs = zip(in_source, neighbors.pictures, strict=True)
            in_source = [is_own and not re.fullmatch(r"row \d+", path) for is_own, path in pairs]
        units = [[row] for row in range(len(in_source))] if groups is None else list(groups.values())
        right = [next((label for row in rows if (label := known[row])), None) for rows in units]
        if groups is None:
            decisions = list[Decision]()
            for block in asked.blocks(QUERY_ROWS):
                rows = slice(len(decisions), len(decisions) + len(block))
                block_neighbors = Neighbors(neighbors.similarities[rows], neighbors.rows[rows])
                decisions += self.decider.decide(
                    block, near=block_neighbors, numbers=None if numbers is None else numbers[rows]
                )
            neighbors = replace(
                neighbors, similarities=neighbors.similarities[:, :NEAREST], rows=neighbors.rows[:, :NEAREST]
            )
        else:
            decisions = decide_groups(self.decider, asked, units, numbers)
            neighbors = neighbors_of_groups(neighbors, groups)
        answers = list[Answer]()
        for (code, score, margin), rows, label in zip(decisions, units, right, strict=True):
            guess, (sigmoid, least_probability) = self.names[code], self.probability(len(rows))
            probability = None if sigmoid is None else sigmoid.at(margin, score)
            is_low = self.threshold is not None and score < self.threshold
            is_doubtful = least_probability is not None and (probability or 0) < least_probability
            answer_label = UNKNOWN if is_low or is_doubtful else guess
            answers.append(Answer(answer_label, guess, probability, score, margin, least_probability, label, len(rows)))
        unit = ("image", "images") if groups is None else ("group", "groups")
        note = "; ".join(self._notes(asked)) or None
        found_there = sum(any(in_source[row] for row in rows) for rows in units)
        return Identified(answers, neighbors, self.threshold, note, unit, found_there)

    def _notes(self, query_points: PointSet) -> Iterator[str]:
        """Yield what of the gallery does not count, and whether its threshold may not hold for the model of points."""
        if self.unlabeled:
            have = counted(self.unlabeled, "image has", "images have")
            yield f"{have} no label in {self.source.source}, to be left out"
        if self.note:
            yield self.note
        local = None if self.gallery is None else self.gallery.manifest.local
        if local is not None and not self.decider.rescored:
            yield f"the patches of {self.source.source} are not compared here"
        note = of_other_model(query_points.manifest, self.source)  # a model that was mapped into the gallery's space
        if note and self.fits and self.threshold is None:
            way = "after dmlkit gallery migrate and dmlkit calibrate one holds"
            yield f"{note}, so the calibration may not hold; {way}"
        elif note and self.threshold is not None and not self.is_own_threshold:
            yield f"{note}, so the threshold may not hold; choose one for it with --threshold"

    def probability(self, size: int) -> tuple[Sigmoid | None, float | None]:
        """Return the probability of guesses on groups of a size, and its minimum if no score decides."""
        fitted = max(count for count in self.fits or SIZES if count <= size)
        if self.fits:
            return self.fits[fitted].sigmoid, self.fits[fitted].threshold if self.threshold is None else None
        if fitted not in self.estimated:
            sigmoid = estimate_probability(self.decider, fitted)
            self.estimated[fitted] = self.probability(fitted // 2)[0] if sigmoid is None and fitted > 1 else sigmoid
        return self.estimated[fitted], None

    def _advice(self) -> str:
        """Return what to do about a threshold that is missing or answers another question."""
        problem = "no image is unknown without a threshold"
        if self.threshold is not None:
            problem = f"the threshold {self.threshold:.6g} is for pairs of images"
        if self.gallery is None:
            return f"{problem}; use identify --threshold, or calibrate a gallery"
        option = f" --where {command_word(self.gallery.where.text)}" if self.gallery.where else ""
        command = f"run dmlkit calibrate {command_word(self.source.source)}{option} to choose one for this gallery"
        missing = [f"each label has a single image: {SECOND_IMAGE}"] if self.decider.sizes.max() == 1 else []
        missing += [MORE_IMAGES] if lacks_absent(self.gallery, self.decider) else []
        return f"{problem}; {'; '.join(missing)}{', then ' if missing else ''}{command}"

    def _pair_threshold(self) -> float | None:
        """Return the threshold for pairs of the calibrated run, as it is now or was when the gallery was created."""
        stored, manifest = None if self.gallery is None else self.gallery.manifest.threshold, self.source.manifest
        if manifest is None:
            return stored
        return threshold_value(self.source.run, manifest.model.fingerprint, stored)


def _note_of_changes(searched: GalleryFolder, calibration: Identification) -> str | None:
    """Return how much of a gallery has changed since its calibration, as far as versions are recorded."""
    versions = searched.manifest.versions if searched.where is None else ()
    later = [version.images for version in versions if version.number > calibration.gallery_version]
    counts = [calibration.images, *later, len(searched)]
    share = sum(abs(after - before) for before, after in pairwise(counts)) / calibration.images
    if share <= STALE:
        return None
    again = f"run dmlkit calibrate {command_word(searched.path)} again"
    return f"{share:.0%} of the images of {searched.source} have changed since it was calibrated; {again}"
