"""A model trained on the labels of a review: its table, and how it does on answers that it was not trained on."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, NamedTuple
from zlib import crc32

import numpy as np
import torch

from dmlkit.datasets.files.class_names import path_fault
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError
from dmlkit.files.document import Document
from dmlkit.files.escape import near_path
from dmlkit.files.outputs import write_table
from dmlkit.gallery.folder import gallery_of
from dmlkit.identify.search import open_searched
from dmlkit.metrics.reliability import Share
from dmlkit.metrics.statistics import few_classes_note, paired_comparison
from dmlkit.nearest.search import Gallery
from dmlkit.review.folder import ReviewFolder
from dmlkit.review.proposals import ProposedLabel, content_id
from dmlkit.run_folder.documents import PairedDifference
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.embedder import Embedder
from dmlkit.vectors.fusion import OWN_MODEL
from dmlkit.vectors.points import load_same_model
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.trained import load_model

NONE_HELD_OUT = (
    "has no answer on an image that the new model is not trained on, to compare it with the gallery's; answer more "
    "questions: one group of checked images in five is held out"
)
HELD_OUT = 5  # one group of near-duplicates in so many is not trained on, if a person has checked one of its images


class TrainingTable(NamedTuple):
    """Table of the images that a model is trained on."""

    file: Path
    """It has the name of the run, and a checksum of its rows if the review has another table of this name."""
    root: Path
    """Folder that the paths are relative to."""
    images: int
    held_out: int
    """Checked images that are not in the table, so that they can test the model."""
    left_out: int
    """Images that are neither in the table nor held out: the file is missing or has changed, or the image is a box."""


def override_of(file: Path, root: Path | str | None, kept: Mapping[str, object] | None = None) -> str:
    """Return the override of a recipe that trains on a table.

    Args:
        kept: values of other keys of the dataset; empty ones are left out.

    Example:
        >>> override_of(Path("june/train.csv"), Path("/photos"))
        'dataset={name: table, file: "june/train.csv", root: "/photos", split: all}'
        >>> override_of(Path("a.csv"), Path("/photos"), {"levels": ["genus", "species"]})
        'dataset={name: table, file: "a.csv", root: "/photos", split: all, levels: ["genus", "species"]}'
    """
    paths = f"file: {json.dumps(str(file))}, root: {json.dumps(root and str(root))}"
    more = "".join(f", {key}: {json.dumps(value, default=str)}" for key, value in (kept or {}).items() if value)
    return f"dataset={{name: table, {paths}, split: all{more}}}"


class ReviewFigures(Document, frozen=True):
    """``evaluations/review.json`` of a run: whether it identifies images of a review better than the older model."""

    kind: ClassVar[str] = "comparison on the answers of a review"

    review: str
    before: str
    """Run of the gallery."""
    answers: int
    """Checked images that the new model was not trained on, whose label others have."""
    labels: int
    """Labels of these images."""
    accuracy: tuple[Share, Share]
    """Share of these images whose nearest labeled image has their label, by the older and by the new model."""
    difference: PairedDifference
    """New minus older model on the same images; the interval is over labels."""

    def line(self, run: str) -> str:
        """Return a line that says whether the new model is better, as far as the interval shows it.

        Example:
            >>> change = PairedDifference(difference=0.05, low=0.02, high=0.08, p_value=0.001)
            >>> figures = ReviewFigures(
            ...     review="june", before="old", answers=90, labels=12, accuracy=(0.85, 0.90), difference=change
            ... )
            >>> figures.line("new").partition(": ")[2]
            'new identifies 0.900, old 0.850: +0.050 (0.020 to 0.080); the new model is better'
        """
        change, (before, after) = self.difference, self.accuracy
        values = f"{run} identifies {after:.3f}, {self.before} {before:.3f}: {change.difference:+.3f}"
        if change.low is None or change.high is None:
            verdict = f"; {few_classes_note(self.labels)}"
        else:
            says = "no difference is detectable"
            if change.low > 0 or change.high < 0:
                says = "the new model is better" if change.low > 0 else "the older model is better"
            verdict = f" ({change.low:.3f} to {change.high:.3f}); {says}"
        return f"{self.answers} answers of {self.labels} labels that it was not trained on: {values}{verdict}"


def write_training_table(folder: Path, name: str, *, levels: Sequence[str] = (), bar: Bar = no_bar) -> TrainingTable:
    """Write the images of a review and of its gallery with their labels, for a recipe to train on.

    Of the groups of near-duplicates of which a person has checked an image, one in `HELD_OUT` is left out, chosen by
    the contents of its images: the same ones are held out if the table is written again with more answers.

    Args:
        levels: names of the levels of the recipe's labels, coarsest first; none for labels that are no paths.
    """
    review = ReviewFolder(folder)
    proposals = review.review.proposals
    held_out = {row for row in range(len(proposals)) if _is_held_out(review, row)}
    labeled, left_out = _gallery_images(Path(review.review.gallery), {proposal.id for proposal in proposals}, bar)
    ids = {proposals[row].id for row in held_out}
    for row, proposal in enumerate(proposals):
        label = review.label(row)
        if label is None or proposal.id in ids:  # of equal files, the first
            continue
        if _is_there(proposal):
            ids.add(proposal.id)
            labeled[os.path.abspath(proposal.path)] = label  # noqa: PTH100 - Path.resolve would follow links
        else:
            left_out += 1
    if not labeled:
        raise UserError(f"{folder}: has no image with a label to train on")
    for path, label in labeled.items() if levels else ():
        if fault := path_fault(label, levels):
            raise UserError(
                f"{path}: {fault}, the dataset.levels of the recipe; correct the answers of {folder} or the labels of "
                "its gallery, or train without levels: --set dataset.levels=[]"
            )
    root = Path(os.path.commonpath([os.path.dirname(path) for path in labeled]))  # noqa: PTH120 - text, not files
    file = folder / f"train_{name}.csv"
    rows = [[os.path.relpath(path, root), label] for path, label in labeled.items()]
    with TemporaryDirectory(dir=folder) as private:  # the ranks of a run write at once
        written = Path(private) / file.name
        write_table(written, ("path", "label"), rows, is_data=True)
        if file.exists() and file.read_bytes() != written.read_bytes():  # a run may have been trained on it
            file = file.with_stem(f"{file.stem}_{crc32(json.dumps(rows).encode()):08x}")
        written.replace(file)
    checked = [row for row in held_out if review.verdict(row) is not None]
    tested = sum(_is_there(proposals[row]) for row in checked)
    return TrainingTable(file, root, len(labeled), tested, left_out + len(checked) - tested)


def held_out_answers(review: ReviewFolder, images: Dataset) -> list[int]:
    """Return the rows of a review that compare a model trained on some images with that of the gallery.

    They are checked, have a label of these images and still their file, and neither they nor their near-duplicates nor
    copies of these are among them.
    """
    trained, proposals = {os.path.realpath(path) for path in images.paths}, review.review.proposals
    seen = {proposal.id for proposal in proposals if os.path.realpath(proposal.path) in trained}
    checked = (row for row in range(len(proposals)) if review.verdict(row) in images.class_names)
    unseen = (row for row in checked if not any(proposals[other].id in seen for other in review.alike(row)))
    return [row for row in unseen if _is_there(proposals[row])]


def compare_on_answers(folder: Path, run: RunFolder, ranks: Ranks, *, bar: Bar = no_bar) -> ReviewFigures:
    """Compare a run with the model of a review's gallery, on checked images that the run was not trained on.

    Both models label each of these images as the nearest image of the run's training table, by their own embeddings.
    The difference is paired, with an interval over labels, see `paired_comparison`. Neither the model nor its number
    of epochs was chosen by these images. The figures are also written into the run.
    """
    review, trained = ReviewFolder(folder), load_model(run, ranks)
    dataset = trained.recipe.dataset
    images = dataset.build(dataset.default_split)
    labels = [images.class_names[label] for label in images.labels.tolist()]
    rows = held_out_answers(review, images)
    if not rows:
        raise UserError(f"{folder}: {NONE_HELD_OUT}")
    correct = [str(review.verdict(row)) for row in rows]
    query_paths = [review.review.proposals[row].path for row in rows]
    searched = open_searched(Path(review.review.gallery), OWN_MODEL, bar)
    right: list[torch.Tensor] = []
    for model in (load_same_model(searched, OWN_MODEL, ranks), trained):
        embedder = Embedder(model, ranks)
        known, queries = (torch.from_numpy(embedder.embed(list(paths))) for paths in (images.paths, query_paths))
        nearest = Gallery(model.manifold, known).search(queries, 1).indices[:, 0].tolist()
        hits = [labels[row] == label for row, label in zip(nearest, correct, strict=True)]
        right.append(torch.tensor(hits, dtype=torch.double))
    codes = torch.from_numpy(np.unique(correct, return_inverse=True)[1])
    change = paired_comparison(right[0], right[1], codes)
    figures = ReviewFigures(
        review=str(folder),
        before=near_path(str(searched.run or searched.source)),
        answers=len(rows),
        labels=len(set(correct)),
        accuracy=(float(right[0].mean()), float(right[1].mean())),
        difference=PairedDifference(**change.as_dict()),  # pyright: ignore[reportArgumentType] - never null but the ends
    )
    run.evaluations.mkdir(exist_ok=True)
    figures.write(run.evaluations / "review.json")
    return figures


def _gallery_images(gallery: Path, reviewed: set[str], bar: Bar) -> tuple[dict[str, str], int]:
    """Return the labels of the images of a gallery by their paths, and the number of those that cannot be trained on.

    Images of the review are left out: their labels are those of the review.
    """
    searched = open_searched(gallery, OWN_MODEL, bar)
    opened = gallery_of(searched)
    ids = [None] * len(searched) if opened is None else opened.ids
    by_path, left_out = dict[str, str](), 0
    with bar("reading the gallery", len(ids)) as advance:
        for name, path, label, box in zip(ids, searched.paths, searched.labels, searched.boxes, strict=True):
            advance(1)
            if label is None:
                continue
            content = content_id(path) if box is None and Path(path).is_file() else None
            if (name or content) in reviewed:
                continue
            if content is not None and name in (None, content):
                by_path[os.path.abspath(path)] = label  # noqa: PTH100 - Path.resolve would follow links
            else:
                left_out += 1
    return by_path, left_out


def _is_there(proposal: ProposedLabel) -> bool:
    """Return whether the file of an image is still the one that the review asks about."""
    return Path(proposal.path).is_file() and content_id(proposal.path) == proposal.id


def _is_held_out(review: ReviewFolder, row: int) -> bool:
    """Return whether an image is in a group that a person has checked and that tests the model."""
    group, proposals = review.alike(row), review.review.proposals
    smallest = min(proposals[member].id for member in group)
    return crc32(smallest.encode()) % HELD_OUT == 0 and any(review.answers(member) for member in group)
