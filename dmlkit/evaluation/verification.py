"""Verification: decide by a run's calibrated threshold whether pairs of images are of the same class.

First the files of pairs, then the documents and tables of the results, the verification itself, and last the threshold
with matches of local features.
"""

from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import ClassVar, NamedTuple
from zlib import crc32

import numpy as np
import torch
from pydantic import BaseModel, FiniteFloat
from torch import Tensor

from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.errors import UserError, warn, warn_once
from dmlkit.evaluation.calibration import (
    fit_scores,
    points_of_split,
    probability_at,
    sampled_pairs,
    threshold_of_pairs,
    threshold_on,
)
from dmlkit.evaluation.second import ROWS, by_features, choose_fusion, choose_local
from dmlkit.files.csv_table import read_csv
from dmlkit.files.document import Document
from dmlkit.files.escape import command_word, excerpt
from dmlkit.files.outputs import write_table
from dmlkit.files.paths import are_of_windows
from dmlkit.files.regular import read_text
from dmlkit.files.source import PARTNERS
from dmlkit.identify.probability import drawn_rows
from dmlkit.metrics.pairing import Pairing
from dmlkit.metrics.reliability import Share
from dmlkit.nearest.rescore import Rescorer
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.run_folder.threshold import PairProbability, Threshold, threshold_of
from dmlkit.vectors.fusion import fuse, with_local
from dmlkit.vectors.images import ImageList
from dmlkit.vectors.in_memory import Embeddings
from dmlkit.vectors.manifest import Fusion, LocalFusion
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.store import hash_images, stored_model
from dmlkit.vectors.stored import embed_files
from dmlkit.vectors.trained import TrainedModel, load_model

ANSWERS = {"1": True, "true": True, "same": True, "0": False, "false": False, "different": False}
"""Values of the column ``same``, in any case."""


class ImagePair(NamedTuple):
    """Two image files, and whether they are of the same class; None if that is unknown."""

    a: str
    b: str
    same: bool | None = None


def read_pairs(paths: Sequence[Path], root: Path | None = None) -> list[ImagePair]:
    """Return the pair of two images, or read the pairs of a file.

    Args:
        paths: two images, or a ``.csv`` file with the columns ``a``, ``b`` and, if the answers are known, ``same`` (1
            or 0); or a ``.txt`` file like that of LFW: ``NAME 1 2`` is a pair of one person, ``NAME 1 OTHER 3`` of
            two, and image 1 is ``NAME/NAME_0001.jpg``.
        root: the folder that names in the file are relative to; by default the file's own folder.
    """
    if len(paths) == 2:
        if root is not None:
            raise UserError(f"verify: --root {root}: applies to a file of pairs; remove --root")
        return [ImagePair(str(paths[0]), str(paths[1]))]
    (path,) = paths
    if path.suffix.lower() not in (".csv", ".txt"):
        raise UserError(f"{path}: expected two images, or a .csv or .txt file of pairs")
    folder = root or path.parent
    pairs = _table(path, folder) if path.suffix.lower() == ".csv" else _lfw(path, folder)
    if not pairs:
        raise UserError(f"{path}: this file has no pairs; expected at least one")
    return pairs


def _table(path: Path, folder: Path) -> list[ImagePair]:
    table = read_csv(path, "no such file; expected a .csv or .txt file of pairs")
    names = [name.lower() for name in table.names]
    if not {"a", "b"} <= set(names) <= {"a", "b", "same"} or len(set(names)) < len(names):
        raise UserError(f"{path}: got the columns {excerpt(', '.join(table.names))}; expected a, b and optionally same")
    pairs: list[ImagePair] = []
    for line, cells in table.rows():
        row = dict(zip(names, cells.values(), strict=True))
        if not row["a"] or not row["b"]:
            raise UserError(f"{path}:{line}: expected {len(names)} cells, {', '.join(names)}, got an empty one")
        answer = ANSWERS.get(row["same"].lower()) if "same" in row else None
        if "same" in row and answer is None:
            raise UserError(f"{path}:{line}: same: got {excerpt(repr(row['same']))}, expected 1 or 0")
        pairs.append(ImagePair(row["a"], row["b"], answer))
    if are_of_windows((name for pair in pairs for name in pair[:2]), folder):
        pairs = [ImagePair(a.replace("\\", "/"), b.replace("\\", "/"), same) for a, b, same in pairs]
    return [ImagePair(str(folder / a), str(folder / b), same) for a, b, same in pairs]


def _lfw(path: Path, folder: Path) -> list[ImagePair]:
    text = read_text(path, "no such file; expected a .csv or .txt file of pairs")
    pairs: list[ImagePair] = []
    for number, line in enumerate(text.splitlines(), start=1):
        match line.split("\t") if "\t" in line else line.split():
            case [name, first, second] if first.isdecimal() and second.isdecimal():
                pairs.append(ImagePair(_image(folder, name, first), _image(folder, name, second), same=True))
            case [name, first, other, second] if first.isdecimal() and second.isdecimal():
                pairs.append(ImagePair(_image(folder, name, first), _image(folder, other, second), same=False))
            case counts if number == 1 and all(count.strip().isdecimal() for count in counts):
                pass  # number of folds, and of pairs in each
            case []:
                pass
            case _:
                raise UserError(
                    f"{path}:{number}: got {excerpt(repr(line))}, expected NAME 1 2 or NAME 1 OTHER 3, as in "
                    "LFW's pairs.txt"
                )
    return pairs


def _image(folder: Path, name: str, number: str) -> str:
    return str(folder / name / f"{name}_{int(number):04d}.jpg")


class JudgedPair(BaseModel, frozen=True, extra="forbid"):
    """Two images and the verdict on them."""

    a: str
    b: str
    score: FiniteFloat | None  # similarity of the images; null if one of them could not be read
    same: bool | None  # whether the similarity reaches the threshold; null if one of the images could not be read
    known: bool | None  # whether they are of the same class by the file of pairs; null if it does not say so
    probability: Share | None  # that they are of the same class; null if one of them could not be read

    @property
    def verdict(self) -> str:
        """Verdict in words."""
        return "not read" if self.same is None else answer(self.same)


class Correctness(BaseModel, frozen=True, extra="forbid"):
    """Error rates of the verdicts on pairs with known answers that could be read."""

    same: int  # number of pairs of the same class
    different: int  # number of pairs of different classes
    accuracy: Share
    far: Share | None  # false accept rate; null if there are no pairs of different classes
    frr: Share | None  # false reject rate; null if there are no pairs of the same class


class Verification(Document, frozen=True):
    """Result of ``dmlkit verify``."""

    kind: ClassVar[str] = "verification of pairs"

    weights: str  # fingerprint of the model
    fusion: Fusion | None = None  # second model, or local features, whose similarity is added, with ``--with``
    similarity: str
    threshold: float
    far: Share  # false accept rate for which the threshold was chosen
    prior: Share  # share of the pairs that are expected to be of the same class, for which the probabilities hold
    pairs: tuple[JudgedPair, ...]
    correctness: Correctness | None  # error rates; null if no answers are known
    skipped: tuple[str, ...]  # one message per image that could not be read

    def save(self, path: Path) -> None:
        """Write a CSV table of all pairs."""
        rows: list[tuple[object, ...]] = []
        for pair in self.pairs:
            known = "" if pair.known is None else answer(pair.known)
            score, probability = ("" if value is None else value for value in (pair.score, pair.probability))
            rows.append((pair.a, pair.b, score, self.threshold, pair.verdict, known, probability))
        write_table(path, ("a", "b", "score", "threshold", "verdict", "known", "probability"), rows)


def answer(same: bool) -> str:
    """Return ``same`` or ``different``."""
    return "same" if same else "different"


@torch.no_grad()  # the curvature of a manifold may be learned
def verify(
    path: Path,
    pairs: Sequence[ImagePair],
    *,
    prior: float = 0.5,
    checkpoint: CheckpointName | None = None,
    second: Path | None = None,
    ranks: Ranks | None = None,
    bar: Bar = no_bar,
) -> Verification:
    """Decide for pairs of images, by the model and threshold of a run, whether they are of the same class.

    Pairs with an image that cannot be read have no verdict; this does not affect the other pairs.

    Args:
        prior: share of the pairs that are of the same class, for which the probabilities hold; verdicts do not depend
            on it.
        second: a second run, or ``local``, whose similarity is added. The threshold is then chosen again on
            the validation classes, for the false accept rate with which the run was calibrated.
    """
    if not 0 < prior < 1:
        raise UserError(f"--prior {prior:g}: expected a share between 0 and 1, e.g. 0.5")
    run, ranks = RunFolder(path), ranks or start_ranks("auto")
    trained = load_model(run, ranks, checkpoint)
    weights = trained.fingerprint
    threshold = threshold_of(run, weights)
    calibrate = f"dmlkit calibrate {command_word(path)}"
    calibrate += f" --checkpoint {checkpoint}" if checkpoint else ""
    calibrate += f" --device {trained.place}" if trained.computation else ""
    calibrate += " --set dataset.root=FOLDER --set dataset.split=official" if run.model else ""
    if threshold is None:
        trained.recipe.dataset.require_one_label(str(path))
        trained.recipe.dataset.require_unseen(str(path))
        if run_classes := run.classes():
            run_classes.require("validation")
        raise UserError(f"{path}: no threshold for the {trained.checkpoint} checkpoint; choose one with {calibrate}")
    if threshold.where is not None and second is None:  # with a second one it is chosen again, for all images
        warn_once(
            f"{path}: its threshold was chosen for {threshold.where} alone; {calibrate} chooses one for all images"
        )
    fusion, local = None, None
    if second is not None and second in PARTNERS:
        calibration = local_threshold(run, trained, threshold.far, ranks, bar)
        local, threshold, fusion = calibration.fusion, calibration.threshold, calibration.fusion.weight
        trained = with_local(trained, local, str(path))
    elif second is not None:
        fusion = choose_fusion(run, trained, second, ranks, bar)
        trained = fuse(trained, fusion, ranks)
        validation = points_of_split(run, trained, "validation", ranks, bar)
        threshold = threshold_on(validation, run, trained, threshold.far)
    images = list(dict.fromkeys(name for pair in pairs for name in (pair.a, pair.b)))
    embeddings, space = embed_files(trained, ranks, ImageList(images), "pairs", bar), deepcopy(trained.manifold).cpu()
    rows = {images[index]: row for row, index in enumerate(embeddings.indices.tolist())}
    read = [[rows[pair.a], rows[pair.b]] for pair in pairs if pair.a in rows and pair.b in rows]
    first, other = torch.tensor(read, dtype=torch.int64).reshape(-1, 2).T
    similarity = space.paired_similarity(embeddings.points[first].double(), embeddings.points[other].double())
    if local is not None:
        assert embeddings.local is not None  # computed with the points
        similarity = by_features(embeddings.local, local).mixed(similarity[:, None], first, other[:, None])[:, 0]
    scores, judged = iter(similarity.float().tolist()), list[JudgedPair]()
    for pair in pairs:
        score = next(scores) if pair.a in rows and pair.b in rows else None
        same = None if score is None else score >= threshold.threshold
        probability = None if score is None else probability_at(score, threshold.probability, prior)
        judged.append(JudgedPair(a=pair.a, b=pair.b, score=score, same=same, known=pair.same, probability=probability))
    if all(pair.same is None for pair in judged):
        raise UserError(f"no pair has two images that can be read; the first error is: {embeddings.faults[0]}")
    return Verification(
        weights=trained.fingerprint,
        fusion=fusion,
        similarity=threshold.similarity,
        threshold=threshold.threshold,
        far=threshold.far,
        prior=prior,
        pairs=tuple(judged),
        correctness=correctness(judged),
        skipped=tuple(embeddings.faults),
    )


def correctness(pairs: Sequence[JudgedPair]) -> Correctness | None:
    """Compute the error rates of verdicts; return None if no answer is known."""
    same = [pair.same for pair in pairs if pair.known is True and pair.same is not None]
    different = [pair.same for pair in pairs if pair.known is False and pair.same is not None]
    if not same and not different:
        return None
    right = sum(same) + len(different) - sum(different)
    return Correctness(
        same=len(same),
        different=len(different),
        accuracy=right / (len(same) + len(different)),
        far=sum(different) / len(different) if different else None,
        frr=1 - sum(same) / len(same) if same else None,
    )


MOST = 600  # validation images, all pairs of which are matched: 180 000 pairs in 30 s


class LocalThreshold(Document, frozen=True, strict=True):
    """``threshold-local.json``: the calibration of ``verify --with``, kept in the run."""

    kind: ClassVar[str] = "calibrated threshold of similarities and matches"

    fusion: LocalFusion  # weight of the matches
    threshold: Threshold  # of both, for the model's fingerprint and the false accept rate in it
    images: str  # hash of the validation images, their labels and their groups
    points: str  # key of the points of the model, see `StoredModel`


def local_threshold(
    run: RunFolder, trained: TrainedModel, far: float, ranks: Ranks, bar: Bar = no_bar
) -> LocalThreshold:
    """Return the weight of matches and the threshold of both similarities: those that the run keeps, or new ones.

    They are chosen again if the weights, the validation images, their groups, the software, the device or ``far`` are
    others.
    """
    config, place = trained.recipe.dataset, run.threshold_path.with_name("threshold-local.json")
    dataset = config.build("validation")
    groups = b"" if dataset.groups is None else dataset.groups.numpy().tobytes()
    current = (f"{hash_images(dataset, config)}-{crc32(groups):08x}", stored_model(trained).key)
    with suppress(UserError):  # there is none, or it is damaged
        stored = LocalThreshold.read(place)
        if (stored.images, stored.points, stored.threshold.far) == (*current, far):
            return stored
    fusion, embeddings, features = choose_local(run, trained, ranks, bar)
    own = dataset.groups_of(embeddings.indices)
    threshold = _chosen_threshold(embeddings, own, by_features(features, fusion), run, trained, far, bar)
    chosen = LocalThreshold(fusion=fusion, threshold=threshold, images=current[0], points=current[1])
    try:
        chosen.write(place)
    except OSError as error:
        warn(f"{place}: cannot write: {error.strerror or error}; the next verify --with local calibrates again")
    return chosen


def _chosen_threshold(
    embeddings: Embeddings,
    groups: Tensor,
    rescorer: Rescorer,
    run: RunFolder,
    trained: TrainedModel,
    far: float,
    bar: Bar,
) -> Threshold:
    """Choose the threshold and the probability of matched pairs on validation images, at most `MOST`."""
    space = deepcopy(trained.manifold).cpu()
    rows = torch.from_numpy(np.sort(drawn_rows(np.arange(len(embeddings.labels)), embeddings.labels.numpy(), MOST)))
    points, labels = embeddings.points[rows].double(), embeddings.labels[rows].unique(return_inverse=True)[1]
    rescorer, groups = rescorer.between(rows, rows), groups[rows]
    table = torch.zeros(len(points), len(points), dtype=torch.float64)
    with bar("matching images", len(points)) as advance:
        for part in torch.arange(len(points)).split(ROWS):
            first = int(part[0])
            similarity = space.similarity(points[part], points[first:])
            others = torch.arange(first, len(points)).expand(len(part), -1)
            table[part, first:] = rescorer.mixed(similarity, part, others)
            advance(len(part))
    table = table.triu() + table.triu(1).T  # a pair has one similarity

    def fit() -> PairProbability:
        first, second = sampled_pairs(labels, groups)
        return fit_scores(table[first, second].numpy(), torch.stack([labels[first], labels[second]], 1).numpy())

    return threshold_of_pairs(
        Pairing.of_table(table, labels, groups), f"{space.similarity_name}_and_matches", fit, run, trained, far
    )
