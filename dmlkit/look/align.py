"""A newer model for older embeddings: a map into their space, put into the head of a copy of its run."""

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset, PickedSamples
from dmlkit.distributed.launch import start_ranks
from dmlkit.errors import UserError
from dmlkit.files.image_file import BadImageError
from dmlkit.files.outputs import check_place, writing
from dmlkit.files.source import NAMES, require_source
from dmlkit.gallery.folder import gallery_of
from dmlkit.gallery.images import LabelledImage
from dmlkit.gallery.sources import open_points
from dmlkit.heads import Linear
from dmlkit.look.point_map import PointMap, SharedImages
from dmlkit.manifolds.sphere import Sphere
from dmlkit.recipe.file import dump_recipe, parse_recipe
from dmlkit.run_folder.documents import Alignment
from dmlkit.run_folder.folder import CheckpointName, RunFolder, aligned_place, named
from dmlkit.vectors.images import dataset_of
from dmlkit.vectors.manifest import Description
from dmlkit.vectors.points import PointSet, separator_of
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.stored import embed_files
from dmlkit.vectors.trained import ALIGNED, FROZEN, TrainedModel, describe, load_model

FLAT = ("sphere", "euclidean")


@torch.no_grad()
def align(
    older: Path,
    run: Path,
    images: Path,
    output: Path | None = None,
    *,
    checkpoint: CheckpointName | None = None,
    device: str = "auto",
    bar: Bar = no_bar,
) -> tuple[Alignment, Path]:
    """Map the model of a run into the space of older embeddings, and write it as a run.

    The map is folded into the linear head of the model, so that the new run embeds, searches and is exported as any
    other, and its embeddings can be compared with the older ones.

    Args:
        images: images, a folder or a table, see `images_at`; those that ``older`` has are used, see `shared_images`.
        output: folder of the run to write. Default: that of ``run`` with ``-aligned`` at its end.

    Returns:
        What was measured, and the folder.
    """
    kind = require_source(older)
    if kind not in ("embeddings", "gallery"):
        raise UserError(
            f"{older}: is {NAMES[kind]}; expected a folder of embeddings or a gallery, with paths of images"
        )
    output = aligned_place(run, output)
    ranks, folder = start_ranks(device), RunFolder(run)
    trained, older_points = load_model(folder, ranks, checkpoint), open_points(older)
    check_place(output, [images, trained.recipe.dataset.data_root], is_run=True)
    manifest = older_points.manifest
    assert manifest is not None  # of embeddings and galleries
    check_can_be_mapped(trained, run, manifest, older)
    dataset, rows, faults = shared_images(dataset_of(images, "test", trained.recipe), older_points)
    check_enough(len(dataset), trained, f"{images}: has {len(dataset)} images of {older}")
    embedded = embed_files(trained, ranks, dataset, str(images), bar)
    dataset, rows = PickedSamples(dataset, embedded.indices, embedded.labels), rows[embedded.indices]
    check_enough(len(dataset), trained, f"{images}: {len(dataset)} images of {older} can be read")
    labels = [item.label for item in older_points.items_at(rows)]
    dataset_labels = dataset.label_names(dataset.labels)
    if trained.recipe.dataset.label_separator is not None or separator_of(older_points) is not None:
        labels = dataset_labels = [None] * len(rows)  # images with several labels have to find themselves
    shared = SharedImages(
        embedded.points,
        older_points.points_at(rows),
        [label or other for label, other in zip(labels, dataset_labels, strict=True)],
        (trained.manifold, older_points.manifold),
    )
    point_map, parts, chosen = shared.choice()
    alignment = Alignment(
        embeddings=str(older),
        fingerprint=manifest.space,
        run=str(named(run)),
        **chosen,
        measured=len(parts.measure),
        skipped=(*faults, *embedded.faults),
        held_out=parts.held_out,
        **shared.figures(point_map, parts),
    )
    write_aligned(folder, trained, manifest, point_map, alignment, output)
    return alignment, output


def check_enough(count: int, trained: TrainedModel, start: str) -> None:
    """Raise an error unless there are twice as many images as dimensions, of which half fit the map."""
    minimum = 2 * trained.manifold.dim
    if count < minimum:
        raise UserError(
            f"{start}; expected at least {minimum}, twice the {trained.manifold.dim} dimensions of the newer run: "
            "name more of the older images"
        )


def check_can_be_mapped(trained: TrainedModel, run: Path, older: Description, where: Path) -> None:
    """Raise an error unless a linear map can be put into the head of a model and lead into the older space."""
    recipe, spaces = trained.recipe, (trained.recipe.manifold.name, older.manifold.name)
    if describe(trained).space == older.space:
        raise UserError(f"{run}: its embeddings can be compared with {where} already; use them as they are")
    if trained.checkpoint == "pretrained":
        raise UserError(
            f"{run}: its checkpoint pretrained has no trained head, into which a map could be put; expected best or "
            "last of a trained run"
        )
    if older.fusion is not None:
        raise UserError(f"{where}: has embeddings of two runs; expected those of one: embed with the first run alone")
    for name, space in zip((run, where), spaces, strict=True):
        if space not in FLAT:
            raise UserError(
                f"{name}: its manifold {space} is curved, so that a linear map moves points off it; expected "
                f"{' or '.join(FLAT)}: embed the images again instead"
            )
    if spaces[0] != spaces[1]:
        raise UserError(
            f"{run}: has points on {spaces[0]}, but {where} on {spaces[1]}; a linear map does not lead from one to "
            f"the other: train on {spaces[1]}"
        )
    if not isinstance(recipe.head, Linear.Config):
        raise UserError(f"{run}: has the head {recipe.head.name}; expected linear, into which a map can be put")
    if getattr(recipe.manifold, "clip_distance", None) is not None:
        raise UserError(
            f"{run}: manifold.clip_distance shortens points, which a linear map before it cannot; train without it"
        )


def shared_images(dataset: Dataset, older: PointSet) -> tuple[Dataset, Tensor, list[str]]:
    """Return the images that older points have too, their rows there, and a message per image that cannot be read.

    An image of a gallery is known by its content, or that of its box; an image of an embeddings folder by the path of
    its file, with links resolved. One that has several points, such as one with several boxes there, is left out.
    """
    names: Sequence[str | None]
    faults = list[str]()
    if (gallery := gallery_of(older)) is not None:
        ids: list[str | None] = [None] * len(dataset)
        for index in range(len(dataset)):
            try:
                ids[index] = LabelledImage(dataset.paths[index], None, dataset.box(index)).id()
            except BadImageError as error:
                faults.append(str(error))
        older_names, names = gallery.ids, ids
    else:
        older_names, names = ([os.path.realpath(path) for path in paths] for paths in (older.paths, dataset.paths))
    counts = Counter[str | None](older_names), Counter(names)
    rows: dict[str | None, int] = {name: row for row, name in enumerate(older_names) if counts[0][name] == 1}
    indices = [index for index, name in enumerate(names) if name in rows and counts[1][name] == 1]
    picked = torch.tensor(indices, dtype=torch.int64)
    of_older = torch.tensor([rows[names[index]] for index in indices], dtype=torch.int64)
    return PickedSamples(dataset, picked, dataset.labels[picked]), of_older, faults


def write_aligned(
    run: RunFolder, trained: TrainedModel, older: Description, point_map: PointMap, alignment: Alignment, output: Path
) -> None:
    """Write a copy of a run whose head contains a map, completely or not at all."""
    recipe = run.recipe()
    head = recipe.head
    if not isinstance(trained.recipe.manifold, Sphere.Config):
        head = head.model_copy(update={"bias": True})
    changes = {"embedding_dim": older.features, "manifold": older.manifold, "head": head}
    text = dump_recipe(recipe.model_copy(update=changes))
    recipe = parse_recipe(text, f"{run.recipe_path} with embedding_dim {older.features}", is_trained=True)
    state = run.load_checkpoint(trained.checkpoint)
    weights = state["model"]
    bias = weights.get("head.linear.bias", torch.zeros(trained.manifold.dim)).double()
    weights["head.linear.weight"] = (point_map.matrix @ weights["head.linear.weight"].double()).float()
    if recipe.head.model_dump()["bias"]:
        weights["head.linear.bias"] = (point_map.matrix @ bias + point_map.offset).float()
    checkpoint = {name: value for name, value in state.items() if name in ("num_features", "model", "epoch", FROZEN)}
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = RunFolder(output.with_name(f".{output.name}.{uuid4().hex}"))
        try:
            partial.create(recipe, overwrite=False)
            if run.classes_path.exists():
                shutil.copyfile(run.classes_path, partial.classes_path)
            alignment.write(partial.alignment_path)
            checkpoint |= {"recipe": dump_recipe(recipe), "objective": {}, ALIGNED: older.space}
            partial.save_checkpoint("best", checkpoint)
            partial.path.rename(output)
        finally:
            if partial.path.exists():
                shutil.rmtree(partial.path)
