"""Gallery in a Python program: what ``dmlkit gallery``, ``search``, ``identify`` and ``calibrate`` do, as methods."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dmlkit.datasets.files.boxes import Boxes
from dmlkit.errors import require_list
from dmlkit.files.source import kind_of
from dmlkit.gallery.change import add_images, create_gallery, remove_images
from dmlkit.gallery.files import MANIFEST, GallerySummary
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.images import Incoming
from dmlkit.gallery.migrate import Migrated, migrate_gallery
from dmlkit.identify.answers import Answers, Identified
from dmlkit.identify.calibration import Identification, calibrate_by_value, calibrate_gallery
from dmlkit.identify.identify import identify
from dmlkit.identify.rule import LabelRule, Rule
from dmlkit.identify.search import search
from dmlkit.vectors.fusion import ModelChoice

ImagePaths = str | Path | Sequence[str | Path]
"""What is asked about: the path of images, of a table or of points; or a list of paths of images."""


class ImageGallery:
    """Labeled images that can be added, removed, searched and identified, made by `dmlkit.gallery`.

    Every call uses the newest version of the folder, which other programs and the command line may change in the
    meantime. A call that embeds images loads the model of the run each time, so pass many images at once, as a folder.

    Args:
        path: folder of the gallery.
        run: run whose model embeds images. Default: the one that the gallery was created with.
        device: device, see `start_ranks`.
    """

    def __init__(self, path: Path, *, run: Path | None = None, device: str = "auto") -> None:
        GalleryFolder(path)  # raises an error now if there is none, or if it is damaged
        self.path, self.run, self.device = path, run, device

    def __len__(self) -> int:
        """Return the number of images."""
        return GallerySummary.of(self.path).versions[-1].images

    def labels(self) -> dict[str | None, int]:
        """Return the number of images of each label; the key None counts those without one."""
        return dict(Counter(GalleryFolder(self.path).labels))

    def add(self, images: str | Path, *, label: str | None = None, boxes: str | Path | Boxes | None = None) -> Incoming:
        """Add images; those that are already in the gallery are reported and skipped.

        Args:
            images: image, folder of images whose subfolders are labels, or table with columns path and label.
            label: label of all images, instead of the names of their folders.
            boxes: boxes of the images, each of which is added: a folder of YOLO's text files, or a JSON file of COCO
                or MegaDetector. Tables of images may have them too. `Boxes` has a margin and a least confidence.

        Returns:
            The outcome: ``added``, the number of new images, and the messages ``repeated`` and ``skipped``.

        Raises:
            UserError: there is no image, or the run has another model.
        """
        path = _paths("add", images)
        if isinstance(path, list):
            raise TypeError("add: expected one path, got a list; list the images in a table, or give their folder")
        return add_images(self.path, path, label=label, boxes=_boxes(boxes), model=self._model(self.run))

    def remove(self, *, labels: Sequence[str] = (), images: Sequence[str | Path] = ()) -> int:
        """Remove images and return their number; ``dmlkit gallery restore`` can restore them.

        Args:
            labels: remove all images with these labels.
            images: remove the images with these ids, or added from these files.

        Raises:
            UserError: nothing is given, or something of it belongs to no image; then nothing is removed.
        """
        require_list("labels", labels)
        require_list("images", images)
        return remove_images(self.path, labels=list(labels), images=list(map(str, images)))

    def migrate(self, run: str | Path, images: str | Path | None = None) -> Migrated:
        """Embed all images again with a newer run, and replace the old embeddings when all are done.

        Args:
            run: run whose model embeds images from now on.
            images: folder that has the images now, if they have moved.

        Returns:
            The outcome; ``dmlkit gallery restore`` returns to version ``before``.

        Raises:
            UserError: an image is missing or has changed; then the gallery is unchanged.
        """
        moved = None if images is None else Path(images)
        outcome = migrate_gallery(self.path, Path(run), moved, model=self._model(None))
        self.run = None
        return outcome

    def search(
        self, queries: ImagePaths, *, k: int = 10, exact: bool = False, boxes: str | Path | Boxes | None = None
    ) -> Answers:
        """Find the k nearest images of each query; ``neighbors()`` of the result yields them, nearest first.

        Args:
            queries: image, list of images, folder or table of images, or a run, embeddings or gallery of the same
                model.
            k: neighbors per query; all images if there are fewer.
            exact: compare with every image, even if the gallery has an index.
            boxes: boxes of the queries, see `add`.

        Raises:
            UserError: there is nothing to search in or with, or the queries come from another model.
        """
        paths = _paths("search", queries)
        model = self._model_for(paths)
        return search(self.path, paths, k=k, method="exact" if exact else "index", boxes=_boxes(boxes), model=model)

    def identify(
        self,
        queries: ImagePaths,
        *,
        method: Rule = "nearest",
        k: int | None = None,
        threshold: float | None = None,
        by: str | None = None,
        boxes: str | Path | Boxes | None = None,
    ) -> Identified:
        """Find the label of each query, or ``unknown``; ``labeled()`` of the result yields path and answer.

        Args:
            queries: see `search`.
            method: rule for the label: ``nearest`` image, or ``vote`` of the k nearest.
            k: number of images that vote. Default: 5.
            threshold: similarity below which an image is unknown. Default: the one given for the gallery, else the
                probability of its calibration, else the threshold of its calibrated run.
            by: ``folder`` or a column of a table: give one answer per group of images with the same one.
            boxes: boxes of the queries, each of which gets an answer, see `add`.

        Raises:
            UserError: the gallery has no image with a label, or the queries come from another model.
        """
        paths, rule = _paths("identify", queries), LabelRule(method, k, threshold, by)
        return identify(self.path, paths, rule=rule, boxes=_boxes(boxes), model=self._model_for(paths))

    def calibrate(
        self,
        *,
        fpir: float | None = None,
        strangers: str | Path | None = None,
        near: float | None = None,
        by: str | None = None,
    ) -> Identification:
        """Find the probability at which `identify` gives a label, store it in the gallery, and return its error rates.

        Args:
            fpir: expected share of the images of other labels, which are not in the gallery, that get a label. Default:
                0.01, or the smallest valid one.
            strangers: images whose labels are not in the gallery. Default: the validation images of its run.
            near: similarity at or above which images of one label count as near-duplicates, which are left out
                together.
            by: column of the gallery's table, e.g. ``side``: each of its values gets a threshold of its own too, which
                `identify` uses.

        Raises:
            UserError: the gallery has too few labels or images for ``fpir``; the message names the smallest valid one.
        """
        others = None if strangers is None else Path(strangers)
        kwargs: dict[str, Any] = {"fpir": fpir, "strangers": others, "near": near, "model": self._model(self.run)}
        return calibrate_gallery(self.path, **kwargs) if by is None else calibrate_by_value(self.path, by, **kwargs)[0]

    def _model(self, run: Path | None) -> ModelChoice:
        return ModelChoice(run, device=self.device)

    def _model_for(self, queries: Path | Sequence[Path]) -> ModelChoice:
        """Return the model for queries that are embedded; points have their own."""
        is_embedded = not isinstance(queries, Path) or (queries.exists() and kind_of(queries) == "images")
        return self._model(self.run if is_embedded else None)


def _paths(call: str, queries: Any) -> Path | list[Path]:
    """Return what was given as one path or a list of them."""
    if isinstance(queries, str | Path):
        return Path(queries)
    items: list[Any] = list(queries) if isinstance(queries, list | tuple) else [queries]
    for item in items:
        if not isinstance(item, str | Path):
            got = type(item).__name__
            raise TypeError(f"{call}: expected a path or a list of paths of images, got {got}; save images first")
    return [Path(item) for item in items]


def _boxes(boxes: str | Path | Boxes | None) -> Boxes | None:
    return Boxes(Path(boxes)) if isinstance(boxes, str | Path) else boxes


def open_gallery(path: str | Path, *, run: str | Path | None = None, device: str = "auto") -> ImageGallery:
    """Open a gallery; if there is none and a run is given, create an empty one.

    Args:
        path: folder of the gallery.
        run: run whose model embeds images, for a new gallery or one whose run has moved.
        device: device, see `start_ranks`.

    Raises:
        UserError: there is no gallery and no run is given, or the gallery is damaged.

    Example:
        >>> from tempfile import mkdtemp
        >>> import dmlkit
        >>> from PIL import Image
        >>> folder = Path(mkdtemp())
        >>> small = ["training.epochs=1", "dataset.classes=12", "sampler={name: random, batch_size: 8}"]
        >>> _ = dmlkit.train("glyphs/proxy_anchor", folder / "run", overrides=small, device="cpu")
        >>> for color in ("red", "blue"):
        ...     (folder / "photos" / color).mkdir(parents=True)
        ...     Image.new("RGB", (8, 8), color).save(folder / "photos" / color / "1.png")
        >>> birds = dmlkit.open_gallery(folder / "birds", run=folder / "run", device="cpu")
        >>> birds.add(folder / "photos").added, len(birds), birds.labels()
        (2, 2, {'blue': 1, 'red': 1})
        >>> [answer.label for path, answer in birds.identify(folder / "photos" / "red").labeled()]
        ['red']
        >>> for path, neighbors in birds.search(folder / "photos" / "red").neighbors():
        ...     print([(neighbor.rank, neighbor.item.label) for neighbor in neighbors])
        [(1, 'red'), (2, 'blue')]
        >>> birds.remove(labels=["red"]), len(birds)
        (1, 1)
    """
    place, source = Path(path), None if run is None else Path(run)
    if source is not None and not (place / MANIFEST).exists():
        create_gallery(source, None, place, model=ModelChoice(device=device))
    return ImageGallery(place, run=source, device=device)
