"""Verification: are two images of one class, by the threshold that was calibrated?"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from lightning_fabric import Fabric
from pydantic import BaseModel, FiniteFloat

from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.images import ImageList
from dmlkit.embedding.in_memory import EMBEDDING, Bar, Embeddings, embed_dataset, no_bar
from dmlkit.embedding.trained import load_model
from dmlkit.errors import UserError
from dmlkit.evaluation.pairs_file import ImagePair
from dmlkit.files.atomic import atomic_write
from dmlkit.files.document import Document
from dmlkit.files.escape import spreadsheet
from dmlkit.files.outputs import head_of, writing
from dmlkit.loading.faults import refuse_nothing_read
from dmlkit.manifolds.base import Manifold
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.run_folder.threshold import Share, threshold_of

COLUMNS = ("a", "b", "score", "threshold", "verdict", "known")


class JudgedPair(BaseModel, frozen=True, extra="forbid"):
    """Two images and what was found."""

    a: str
    b: str
    score: FiniteFloat | None
    """Their similarity; null where one of them could not be read."""
    same: bool | None
    """Whether it reaches the threshold; null likewise."""
    known: bool | None
    """Whether they are of one class, where the file of pairs says so."""

    @property
    def verdict(self) -> str:
        """In a word."""
        return "not read" if self.same is None else answer(self.same)


class Correctness(BaseModel, frozen=True, extra="forbid"):
    """How right the verdicts are, of the pairs with known answers that could be read."""

    same: int
    """Pairs of one class."""
    different: int
    """Pairs of two classes."""
    accuracy: Share
    far: Share | None
    """False accept rate; null without pairs of two classes."""
    frr: Share | None
    """False reject rate; null without pairs of one class."""


class Verification(Document, frozen=True):
    """What ``dmlkit verify`` found."""

    kind: ClassVar[str] = "verification of pairs"

    weights: str
    """Fingerprint of the model."""
    similarity: str
    threshold: float
    pairs: tuple[JudgedPair, ...]
    correctness: Correctness | None
    """Null where no answers are known."""
    skipped: tuple[str, ...]
    """One message per image that could not be read."""

    def save(self, path: Path) -> None:
        """Write a CSV table of all pairs; a name that a spreadsheet would compute gets an apostrophe.

        Raises:
            UserError: it cannot be written.
        """
        import csv

        with writing(path), atomic_write(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for pair in self.pairs:
                known = "" if pair.known is None else answer(pair.known)
                score = "" if pair.score is None else pair.score
                names = spreadsheet(pair.a), spreadsheet(pair.b)
                writer.writerow([*names, score, self.threshold, pair.verdict, known])


def answer(same: bool) -> str:
    """Same or not, in a word."""
    return "same" if same else "different"


def is_pairs_table(path: Path) -> bool:
    """Whether `Verification.save` wrote a file."""
    return head_of(path).decode("utf-8", "replace").partition("\n")[0].strip() == ",".join(COLUMNS)


@torch.no_grad()  # the curvature of a manifold may be learned
def verify(
    path: Path,
    pairs: Sequence[ImagePair],
    *,
    checkpoint: CheckpointName | None = None,
    fabric: Fabric | None = None,
    bar: Bar = no_bar,
) -> Verification:
    """Judge pairs of images by the model of a run and its threshold.

    An image that cannot be read leaves its pairs without a verdict, and the others go on.

    Args:
        path: of the run, which was calibrated.
        pairs: of image files.
        checkpoint: which weights; by default the best, else the last.
        fabric: a device.
        bar: shows each step.

    Raises:
        UserError: the run has no threshold for these weights, or none of the images can be read.
    """
    run, fabric = RunFolder(path), fabric or start_fabric("auto")
    trained = load_model(run, fabric, checkpoint)
    weights = trained.model.fingerprint()
    threshold = threshold_of(run, weights)
    if threshold is None:
        raise UserError(
            f"{path}: no threshold for the {trained.checkpoint} checkpoint; find one with dmlkit calibrate {path}"
            + (f" --checkpoint {checkpoint}" if checkpoint else "")
        )
    images = list(dict.fromkeys(name for pair in pairs for name in (pair.a, pair.b)))
    workers = trained.recipe.training.workers if len(images) > 1000 else 0  # to start them takes seconds
    transform, listed = trained.recipe.transform, ImageList(images)
    with bar(EMBEDDING, len(images)) as advance:
        found = embed_dataset(fabric, trained.model, listed, transform, workers=workers, advance=advance)
    refuse_nothing_read(len(found.labels), found.faults, "pairs")
    judged = judge(pairs, images, found, trained.model.manifold.cpu(), threshold.threshold)
    if all(pair.same is None for pair in judged):
        raise UserError(f"no pair has two images that can be read; the first: {found.faults[0]}")
    return Verification(
        weights=weights,
        similarity=threshold.similarity,
        threshold=threshold.threshold,
        pairs=tuple(judged),
        correctness=correctness(judged),
        skipped=tuple(found.faults),
    )


def judge(
    pairs: Sequence[ImagePair], images: Sequence[str], found: Embeddings, manifold: Manifold, threshold: float
) -> list[JudgedPair]:
    """The verdict of each pair, from the points of the images that could be read."""
    rows = {images[index]: row for row, index in enumerate(found.indices.tolist())}
    read = [pair for pair in pairs if pair.a in rows and pair.b in rows]
    first, second = (found.points[[rows[name] for name in side]] for side in ([p.a for p in read], [p.b for p in read]))
    scores = manifold.paired_similarity(first.double(), second.double()).float().tolist()
    known = iter(scores)
    judged: list[JudgedPair] = []
    for pair in pairs:
        score = next(known) if pair.a in rows and pair.b in rows else None
        same = None if score is None else score >= threshold
        judged.append(JudgedPair(a=pair.a, b=pair.b, score=score, same=same, known=pair.same))
    return judged


def correctness(pairs: Sequence[JudgedPair]) -> Correctness | None:
    """How right verdicts are; None where no answer is known.

    Example:
        >>> pairs = [JudgedPair(a="a", b="b", score=0.9, same=True, known=known) for known in (True, False)]
        >>> correctness(pairs).accuracy, correctness(pairs).far
        (0.5, 1.0)
    """
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
