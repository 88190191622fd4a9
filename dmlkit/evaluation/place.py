"""Place and time of the images of a run, and the weight of their evidence, chosen on validation classes."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.errors import UserError
from dmlkit.evaluation.by_value import column_table, read_column
from dmlkit.evaluation.fusion import Weighing, WeightChoice, map_at_r, similarities_of
from dmlkit.evaluation.pair_probability import sampled_pairs
from dmlkit.files.image_table import LIMITS, days_of, degrees_of
from dmlkit.files.source import PLACE
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.identify.probability import fit_sigmoid
from dmlkit.identify.second import PlaceFusion, check_placed
from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.reliability import balanced
from dmlkit.nearest.place import Range, Sightings, evidence_of, kilometers
from dmlkit.nearest.rescore import Rescorer
from dmlkit.recipe.file import plain
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.vectors.in_memory import Embeddings
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import TrainedModel, load_model

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the typical distance and time of two sightings of one class, which are tried
LEAST_KM = 1e-3


def choose_place(
    run: Path, *, checkpoint: CheckpointName | None = None, fabric: Ranks, bar: Bar = no_bar
) -> PlaceFusion:
    """Choose home range, decay and weight of the evidence of place and time on validation classes.

    Range and decay are those of a grid around the typical distance and time of two images of one class with which a
    logistic regression on similarity and evidence has the highest likelihood; the weight is then chosen as by
    `choose_fusion`.

    Args:
        run: the run, whose dataset is a table with the columns ``latitude``, ``longitude`` and, optionally, ``time``.
    """
    folder = RunFolder(run)
    trained = load_model(folder, fabric, checkpoint)
    trained.recipe.dataset.require_one_label("--with place")
    dataset = trained.recipe.dataset.build("validation")
    sightings_of(trained, dataset, [0])  # before anything is embedded
    found = split_embeddings(folder, trained, fabric, dataset, "validation", bar=bar)
    sightings = sightings_of(trained, dataset, found.indices.tolist())
    with torch.no_grad():
        span, choice = weigh_place(found, deepcopy(trained.manifold).cpu(), sightings)
    return PlaceFusion(
        run=PLACE,
        checkpoint=trained.checkpoint,
        fingerprint=trained.fingerprint,
        **choice._asdict(),
        kilometers=span.kilometers,
        spread=span.spread,
        days=span.days if isfinite(span.days) else None,
    )


def place_in(
    gallery: GalleryFolder, *, run: Path | None = None, device: str = "auto", bar: Bar = no_bar
) -> PlaceFusion:
    """Choose the weight of place and time in a gallery, see `choose_place`.

    Args:
        device: device, see `start_ranks`; an engine after it is that of the queries.
    """
    check_placed(gallery)
    home = run or gallery.run
    if home is None:
        raise UserError(f"{gallery.source}: the run that made it is unknown or has moved; name the run with --run RUN")
    checkpoint = gallery.manifest.model.checkpoint
    return choose_place(home, checkpoint=checkpoint, fabric=start_ranks(device.partition("+")[0]), bar=bar)


def weigh_place(found: Embeddings, manifold: Manifold, sightings: Sightings) -> tuple[Range, WeightChoice]:
    """Choose the home range of sightings (N,) of images, and the weight of their evidence."""
    pairs = sampled_pairs(found.labels)
    sides = sightings.chosen(pairs[0]), sightings.chosen(pairs[1])
    similarity = similarities_of(manifold, found.points, *pairs)
    span = fit_range(similarity, (found.labels[pairs[0]] == found.labels[pairs[1]]).numpy(), sides)
    rescorer = Rescorer(evidence_of(sightings, span), 0.0)

    def placed_map(share: float, asked: Tensor) -> Tensor:
        return map_at_r(found.points, found.labels, manifold, asked, replace(rescorer, share=share))

    scores = [similarity, span.evidence(*sides).numpy()]
    return span, Weighing(found.labels, pairs, scores, placed_map).choice()


def fit_range(similarity: np.ndarray, same: np.ndarray, sides: tuple[Sightings, Sightings]) -> Range:
    """Return the home range and decay with which similarity (P,) and evidence show best which pairs are the same."""
    squares = kilometers(sides[0].places, sides[1].places).square().numpy()
    days = (sides[0].days - sides[1].days).abs().numpy()
    known = np.isfinite(squares) & np.isfinite(days)
    if not (known & same).any() or not (known & ~same).any():
        return Range(1.0, 1.0, inf)
    # the mean of d^2 is 2 r^2 if both coordinates of the difference are normal with deviation r
    typical, spread = (max(float(np.sqrt(squares[known & part].mean() / 2)), LEAST_KM) for part in (same, ~same))
    usual = float(days[known & same].mean())
    decays = [inf, *(factor * usual for factor in FACTORS)] if usual > 0 else [inf]
    balance = balanced(np.ones(len(same)), same)
    best, found = inf, Range(typical, max(typical, spread), inf)
    for kilometer in (factor * typical for factor in FACTORS):
        for decay in decays:
            one = Range(kilometer, max(kilometer, spread), decay)
            evidence = one.evidence(*sides).numpy()
            said = fit_sigmoid(similarity, evidence, same, balance).of(similarity, evidence).clip(1e-12, 1 - 1e-12)
            loss = -float(balance @ np.where(same, np.log(said), np.log1p(-said)))
            if loss < best:
                best, found = loss, one
    return found


def sightings_of(trained: TrainedModel, dataset: Dataset, indices: Sequence[int]) -> Sightings:
    """Return where and when images of a dataset were taken, from the table of the run."""
    images, name = [dataset.key(index) for index in indices], trained.recipe.dataset.name
    if name != "table":
        raise UserError(
            f"--with {PLACE}: the dataset is {name}, which has no columns; train on a table with the columns path, "
            "label, latitude, longitude and time"
        )
    table = column_table("latitude", None, plain(trained.recipe)["dataset"])
    degrees: list[Tensor] = []
    for column in LIMITS:
        cells = zip(images, read_column(images, table, column), strict=True)
        degrees.append(torch.tensor([degrees_of(cell, column, f"{table.file}: {one}") for one, cell in cells]).double())
    days = torch.zeros(len(images), dtype=torch.float64)
    if "time" in table.table(("path",)).table.column_names:
        cells = zip(images, read_column(images, table, "time"), strict=True)
        days = torch.tensor([days_of(cell, f"{table.file}: {one}") for one, cell in cells], dtype=torch.float64)
    return Sightings.at(degrees[0], degrees[1], days)
