"""The one door to points: a run, a folder of embeddings, a gallery or an array, and images to search with."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dmlkit.datasets.base import Split
from dmlkit.datasets.files.boxes import Boxes
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import VideoFrames
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError, counted, warn_once
from dmlkit.files.labels import label_notes, label_of
from dmlkit.files.regular import is_video
from dmlkit.files.source import Kind, check_options, require_queries, require_source
from dmlkit.files.vector_file import VectorFile, holds_vectors, read_label_file
from dmlkit.files.where import Where, cells_of
from dmlkit.gallery.folder import GalleryFolder, gallery_of
from dmlkit.manifolds.base import Manifold, ManifoldConfig
from dmlkit.manifolds.sphere import Sphere
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.fusion import OWN_MODEL, ModelChoice, with_local
from dmlkit.vectors.images import OPTIONAL, ImageList, dataset_of
from dmlkit.vectors.in_memory import Embeddings
from dmlkit.vectors.manifest import check_same_description
from dmlkit.vectors.points import EmbeddedImages, PointSet, PointsInMemory, load_same_model, some_points
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.stored import embed_files, split_embeddings
from dmlkit.vectors.trained import TrainedModel, describe


def open_points(
    source: Path,
    *,
    split: Split | None = None,
    overrides: Sequence[str] = (),
    labels: Path | None = None,
    manifold: str | None = None,
    where: Where | None = None,
    model: ModelChoice = OWN_MODEL,
    bar: Bar = no_bar,
) -> PointSet:
    """Open a run, a folder of embeddings, a gallery or an array; a run's images are embedded if they are not yet.

    Args:
        split: split of a run's dataset. Default: test, or all if every class was trained on.
        labels: file of the labels (N,) of a file of vectors. Default: those inside.
        manifold: ``sphere`` or ``euclidean``, the geometry of an array. Default: sphere.
        where: conditions on the columns of a gallery, of a folder of embeddings, of a file of vectors or of the table
            of a run's dataset.
        model: checkpoint and device of a run, and a second model that embeds its images too.
    """
    kind = require_source(source)
    options = {"--split": split, "--set": list(overrides), "--checkpoint": model.checkpoint, "--device": model.device}
    check_options(
        source, kind, {**options, "--labels": labels, "--manifold": manifold, "--where": where and where.text}
    )
    points: PointSet
    match kind:
        case "run":
            ranks, folder = model.start(), RunFolder(source)
            trained = model.load(folder, ranks, overrides=overrides).limited(where)
            return split_points(folder, trained, ranks, split or trained.recipe.dataset.default_split, bar)
        case "embeddings":
            points = EmbeddingFolder(source)
            points = points if where is None else _limited(points, {"id": points.items["id"]}, where)
        case "gallery":
            points = GalleryFolder(source, where)
        case _:
            points = array_points(source, labels, manifold or "sphere", where)
    if len(points) == 0:
        is_gallery = kind == "gallery"
        advice = "add images to it with dmlkit gallery add" if is_gallery else "expected at least one embedding"
        raise UserError(f"{source}: {'this gallery' if is_gallery else 'this source'} is empty; {advice}")
    return points


def _limited(points: PointSet, columns: Mapping[str, Any], where: Where) -> PointSet:
    """Return the points that fulfill conditions on columns, or on their labels and paths."""
    cells = cells_of({"label": points.labels, "path": points.paths, **columns})
    return some_points(points, torch.tensor(where.rows(cells, points.source, len(points))))


def path_of(queries: Path | Sequence[Path]) -> Path:
    """Return the path of queries; for a list of images a name that is in messages."""
    return queries if isinstance(queries, Path) else Path("a list of images")


def open_queries(
    queries: Path | Sequence[Path],
    searched: PointSet,
    *,
    boxes: Boxes | None = None,
    local: bool = False,
    model: ModelChoice = OWN_MODEL,
    bar: Bar = no_bar,
) -> PointSet:
    """Open what to search with: images, which the model of the searched points embeds, or points of the same model.

    Args:
        queries: an image, a list of images, a folder or table of images, or whatever `open_points` takes.
        local: compute the local features too that the searched gallery keeps, if it does.
    """
    if isinstance(queries, Path):
        kind = require_queries(queries)
        if searched.manifest is None and holds_vectors(queries, with_paths=True):
            kind = "array"  # of a table of images with their vectors, these are searched with
        check_options(queries, kind, {"--run": model.run, **(Boxes() if boxes is None else boxes).given()})
        if kind == "array":
            return array_points(queries, None, searched.manifold, boxes and boxes.where, is_asked=True)
        if kind == "run":
            return _same_model(open_points(queries, model=ModelChoice(device=model.device), bar=bar), searched)
        if kind != "images":
            return _same_model(_stored_queries(queries, kind, boxes and boxes.where), searched)
    elif not queries:
        raise UserError("got an empty list of images; expected at least one")
    elif boxes is not None and boxes.option:
        raise UserError(f"{boxes.option}: applies to a folder or a table of images, not to a list; give one of them")
    ranks = model.start()
    trained = load_same_model(searched, model, ranks)
    gallery = gallery_of(searched)
    if local and gallery is not None:
        trained = with_local(trained, gallery.manifest.local, searched.source)
    return embedded_points(trained, ranks, _images_of(queries, trained, boxes), str(path_of(queries)), bar)


def _stored_queries(path: Path, kind: Kind, where: Where | None) -> PointSet:
    """Open a folder of embeddings or a gallery to search with, limited by conditions on columns of its table.

    Labels, paths and ids are no such columns: those of queries are others.
    """
    if kind != "gallery":
        return EmbeddingFolder(path)
    gallery = GalleryFolder(path)
    own = None if where is None else where.on(gallery.cells(), gallery.source)
    return gallery if own is None else GalleryFolder(path, own)


def _same_model(theirs: PointSet, ours: PointSet) -> PointSet:
    check_same_model(theirs, ours)
    return theirs


def _images_of(queries: Path | Sequence[Path], trained: TrainedModel, boxes: Boxes | None) -> Dataset:
    """Return the images, boxes or frames of a video to search with, for the model that embeds them."""
    if not isinstance(queries, Path):
        return ImageList([str(image) for image in queries])
    if is_video(queries) and trained.samples.has_pixels:
        if boxes is not None and boxes.option:
            raise UserError(f"{boxes.option}: applies to images, but {queries} is a video; remove this option")
        return VideoFrames(queries)
    boxes = boxes and boxes._replace(skips=True)
    return dataset_of(queries, "test", trained.recipe, OPTIONAL if trained.samples.has_pixels else None, boxes)


def embedded_points(
    trained: TrainedModel, ranks: Ranks, dataset: Dataset, source: str, bar: Bar = no_bar
) -> PointsInMemory:
    """Embed the images of a dataset that can be read."""
    return _with_images(embed_files(trained, ranks, dataset, source, bar), trained, dataset, source)


def split_points(
    run: RunFolder, trained: TrainedModel, ranks: Ranks, split: Split, bar: Bar = no_bar, *, with_gallery: bool = False
) -> PointsInMemory:
    """Return the points of the images of a run's split that can be read, see `split_embeddings` and `embed_split`."""
    config = trained.recipe.dataset
    dataset = config.searched(split) if with_gallery else config.build(split)
    embeddings = split_embeddings(run, trained, ranks, dataset, split, bar=bar)
    return _with_images(embeddings, trained, dataset, f"{split} split of {run.path}", run.path)


def _with_images(
    embeddings: Embeddings, trained: TrainedModel, dataset: Dataset, source: str, run: Path | None = None
) -> PointsInMemory:
    """Return embeddings with what is known of their images."""
    description = describe(trained)
    return PointsInMemory(
        source,
        description.build_manifold(),
        embeddings.points,
        [str(dataset.paths[row]) for row in embeddings.indices.tolist()],
        dataset.label_names(embeddings.labels),
        description,
        run,
        (*dataset.left_out, *embeddings.faults),
        [dataset.box(row) for row in embeddings.indices.tolist()],
        EmbeddedImages(trained, dataset, embeddings.indices, embeddings.local),
    )


def array_points(
    path: Path, labels: Path | None, space: Manifold | str, where: Where | None = None, *, is_asked: bool = False
) -> PointSet:
    """Read a file of embeddings of any model, (N, D) numbers, see `VectorFile`.

    Args:
        labels: file of its labels, (N,) integers or text. Default: those inside.
        space: the manifold of the rows, or its name: ``sphere`` (cosine of the directions) or ``euclidean``.
        is_asked: the rows are queries, which only conditions on columns that they have limit.
    """
    from dmlkit.metrics.ranking.rankings import as_directions, as_embeddings, require_points  # with searches of metrics

    vectors = VectorFile(path)
    try:
        points = as_embeddings(vectors.values, str(path))
        manifold = ManifoldConfig.variants[space]().build(points.shape[1]) if isinstance(space, str) else space
        if isinstance(manifold, Sphere) and points.shape[1] == manifold.dim:
            points = as_directions(points, str(path))
        else:
            require_points(manifold, points, str(path))
    except ValueError as error:
        raise UserError(str(error)) from None
    texts = vectors.labels() if labels is None else read_label_file(labels)
    names: list[str | None] = [None] * len(points)
    if texts is not None:
        if len(texts) != len(points):
            rows = counted(len(points), "row", "rows")
            raise UserError(f"--labels {labels}: has {counted(len(texts), 'label', 'labels')}, but {path} has {rows}")
        counts = Counter[str]("" if text is None else text for text in texts.to_pylist())
        for note in label_notes(counts, str(labels or path)):
            warn_once(note)
        label_by_text = {text: label_of(text) for text in counts}
        names = [label_by_text[text or ""] for text in texts.to_pylist()]
    columns = vectors.columns
    known: Sequence[str] = columns.column_names
    array = PointsInMemory(str(path), manifold, points.float(), vectors.names, names, columns=known)
    own = [name for name in known if not is_asked or name not in ("label", "path", "id")]
    if is_asked and where is not None:
        where = where.on(own, str(path))
    return array if where is None else _limited(array, {name: columns[name] for name in own}, where)


def check_same_model(theirs: PointSet, ours: PointSet) -> None:
    """Raise an error for points of two models."""
    if theirs.manifest is not None and ours.manifest is not None:
        check_same_description(theirs.manifest, theirs.source, ours.manifest, ours.source)
    elif type(theirs.manifold) is not type(ours.manifold) or theirs.manifold.point_dim != ours.manifold.point_dim:
        dims = [f"{side.manifold.point_dim} dimensions on {type(side.manifold).__name__}" for side in (theirs, ours)]
        raise UserError(
            f"{theirs.source}: has {dims[0]}, but {ours.source} has {dims[1]}; expected embeddings of the same model"
        )
