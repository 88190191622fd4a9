"""What a server answers, on one thread: images that wait together are embedded together."""

import hashlib
import os
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from torch import Tensor

from dmlkit.datasets.files.image import decode_image, decoded_pixels
from dmlkit.errors import UserError, warn
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import excerpt, printable
from dmlkit.files.image_file import Box, decoding
from dmlkit.files.labels import stated_label
from dmlkit.files.outputs import GALLERY_MARK, writing
from dmlkit.files.regular import EXTENSIONS
from dmlkit.files.source import model_name, require_source
from dmlkit.gallery.change import add_images
from dmlkit.gallery.files import IDENTIFICATION
from dmlkit.gallery.folder import GalleryFolder, gallery_of
from dmlkit.gallery.images import LabelledImage
from dmlkit.identify.answers import Answers
from dmlkit.identify.calibration import Identification
from dmlkit.identify.identify import Identifier
from dmlkit.identify.search import SearchedOften, nearest, open_searched
from dmlkit.loading.inputs import check_resized
from dmlkit.run_folder.folder import RunFolder
from dmlkit.run_folder.threshold import threshold_value
from dmlkit.serve.requests import busy
from dmlkit.vectors.embedder import Embedder, GivenImages
from dmlkit.vectors.fusion import OWN_MODEL, ModelChoice
from dmlkit.vectors.points import (
    EmbeddedImages,
    PointSet,
    PointsInMemory,
    in_memory,
    load_same_model,
    warn_of_other_model,
)
from dmlkit.vectors.progress_bar import no_bar
from dmlkit.vectors.trained import describe

Stamp = tuple[str, int, int, int]
"""Name, number, time of the last change and size of a file."""
Pixels = NDArray[np.uint8]
"""RGB image (H, W, 3)."""
MOST_PIXELS = 200_000_000  # of one request; decoded, they take 600 MB
MOST_WAITING = 256  # images of all requests; at 60 images/s the last one waits 4 s, more are refused
MOST_PIXELS_WAITING = 2 * MOST_PIXELS  # of all requests
MOST_AT_ONCE = 32  # images in one batch of the model, unless a single request has more
MOST_ON_CPU = 8  # the same on a CPU, where more are no faster; meanwhile the next ones are decoded (16 clients: +15 %)
SENT = ("label", "guess", "probability", "score", "margin")  # of an answer
UPLOADS = "uploads"  # folder in a gallery for the images that a server adds


class Snapshot:
    """The points that are served, at one version; ``stamp`` is what changes with the files of a gallery."""

    def __init__(self, opened: PointSet, stamp: object) -> None:
        self.loaded, gallery = in_memory(opened), gallery_of(opened)
        ids = gallery.ids if gallery else range(len(self.loaded))
        self.points = SearchedOften(**vars(self.loaded), ids=ids)
        assert self.loaded.manifest is not None
        self.manifest, self.version = self.loaded.manifest, gallery.version if gallery else None
        index = gallery.approximate if gallery else None
        self.recall = index.recall if index else 1.0
        self.stamp = stamp
        self._lock = threading.Lock()

    @cached_property
    def rows(self) -> dict[str, int]:
        """Rows of the points by the ids of their images."""
        return {str(name): row for row, name in enumerate(self.points.ids)}

    @cached_property
    def identifier(self) -> Identifier:
        """Rule that labels other images."""
        return Identifier(self.points)

    def image(self, row: int) -> tuple[Path | Pixels, Box | None]:
        """Return an image and its box: of a run its pixels, since rendered ones have no file, else its file."""
        if (images := self.loaded.images) is None:
            return Path(self.points.paths[row]), self.points.boxes[row]
        return images.dataset.sample(int(images.rows[row])).permute(1, 2, 0).numpy(), None

    def picture(self, row: int) -> bytes | None:
        """Return a small JPEG of an image, that of its gallery if there is one; None if it cannot be read."""
        with self._lock:
            return self.loaded.picture(row)


class Task(NamedTuple):
    """Images to embed, and what to do with their points (n, D)."""

    images: Sequence[Pixels]
    work: Callable[[Tensor], Any]
    done: Future[Any]


class Service:
    """Model and points of a server. The model computes on one thread, in the order in which requests came.

    Other processes may change a gallery meanwhile: each request sees its newest version. The model is opened on that
    thread too, because torch keeps idle threads for each thread that has computed on several cores: with those of a
    second one there are more than processors, and then they sleep between two operations, which takes 1.5 times as long
    (Lite0, 2 cores). Torch's work on a batch with images for all cores is divided among further threads, see `_embed`.
    """

    def __init__(self, source: Path, model: ModelChoice = OWN_MODEL) -> None:
        self.kind, self.source, self.chosen = require_source(source), source, model
        if self.kind == "array":
            raise UserError(f"{source}: the model of an array is not known; expected a run, embeddings or a gallery")
        self._tasks: queue.Queue[Task | None] = queue.Queue()
        self._waiting, self._pixels, self._count = 0, 0, threading.Lock()
        opened = Future[None]()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="model", daemon=True)
        self._thread.start()
        opened.result()

    def _run(self, opened: "Future[None]") -> None:
        """Open the source, and do the tasks until the end."""
        try:
            opened.set_result(self._open())
        except BaseException as error:
            opened.set_exception(error)
            return
        while (task := self._tasks.get()) is not None:
            tasks = [task]
            while sum(len(queued.images) for queued in tasks) < self.at_once and not self._tasks.empty():
                if (following := self._tasks.get()) is None:
                    self._tasks.put(None)  # the end comes after these
                    break
                tasks.append(following)
            self._work(tasks)

    def _open(self) -> None:
        source, model = self.source, self.chosen
        of_source, ranks = self._stamp_of_source(), model.start()
        opened: PointSet
        if self.kind == "gallery":
            opened = GalleryFolder(source)
        elif model_name(source) is None:
            opened = open_searched(source, model, no_bar)
        else:  # a pretrained model has no points
            trained = model.load(RunFolder(source), ranks)
            manifest, points = describe(trained), torch.empty(0, trained.manifold.point_dim)
            images = EmbeddedImages(trained, GivenImages([]), torch.empty(0, dtype=torch.int64))
            opened = PointsInMemory(
                str(source), manifest.build_manifold(), points, [], [], manifest, source, images=images
            )
        self.at_once = MOST_ON_CPU if ranks.device.type == "cpu" else MOST_AT_ONCE
        self.run = model.run or opened.run
        self.embedder = Embedder(load_same_model(opened, model, ranks), ranks)
        warn_of_other_model(describe(self.embedder.trained), opened)
        samples = self.embedder.trained.samples
        if not samples.has_pixels:
            raise UserError(f"{source}: its model takes {samples.name}s, and a server takes images only")
        self._max_pixels = min(self.embedder.trained.recipe.dataset.max_pixels, MOST_PIXELS)
        self.snapshot = Snapshot(opened, of_source + self._stamp_of_run())
        gallery = gallery_of(opened)
        calibrated = None if gallery is None else Identification.of(gallery)
        if calibrated is not None and calibrated.column is not None:
            warn(f"{source}: a request has no {calibrated.column}, so identify takes the threshold of all images")
        self.embedder.embed([np.zeros((8, 8, 3), np.uint8)])  # the first one takes longer
        computed = self.embedder.trained.computation
        is_divided = ranks.device.type == "cpu" and (computed is None or computed.engine == "torch")
        self._parts = torch.get_num_threads() if is_divided else 1
        self._pool = ThreadPoolExecutor(self._parts, "part", torch.set_num_threads, (1,))

    def decode(self, name: str, content: bytes) -> Pixels:
        """Decode the file of an image as the model takes it."""
        name, trained = printable(excerpt(name)), self.embedder.trained
        with decoding(name):
            pixels = decode_image(name, content, None, self._max_pixels)
        for model in trained.members or (trained,):
            assert model.recipe.transform is not None
            check_resized(pixels, model.recipe.transform.resizing, name)
        return np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())

    def count_pixels(self, files: Sequence[tuple[str, bytes]]) -> int:
        """Return how many pixels the images of a request have once they are decoded, from their headers."""
        pixels = sum(decoded_pixels(printable(excerpt(name)), content, self._max_pixels) for name, content in files)
        if pixels > MOST_PIXELS:
            raise HTTPException(
                413,
                f"the images have {pixels / 1e6:,.0f} megapixels together, expected at most {MOST_PIXELS / 1e6:g}; "
                "send fewer or smaller images",
            )
        return pixels

    @contextmanager
    def held(self, images: int, pixels: int) -> Generator[None]:
        """Count the images of a request as waiting within the block."""
        with self._count:
            if self._waiting + images > MOST_WAITING or self._pixels + pixels > MOST_PIXELS_WAITING:
                raise busy()
            self._waiting, self._pixels = self._waiting + images, self._pixels + pixels
        try:
            yield
        finally:
            with self._count:
                self._waiting, self._pixels = self._waiting - images, self._pixels - pixels

    def submit(self, images: Sequence[Pixels], work: Callable[[Tensor], Any]) -> Future[Any]:
        """Return the result of ``work(points)``, called with the points (n, D) of the images when their turn comes."""
        task = Task(images, work, Future())
        self._tasks.put(task)
        return task.done

    def close(self) -> None:
        """Finish what waits, and end the thread."""
        self._tasks.put(None)
        self._thread.join()
        self._pool.shutdown()

    def search(self, points: Tensor, k: int) -> list[list[dict[str, Any]]]:
        """Return the k nearest images of each point (n, D)."""
        return _nearest(nearest(self.snapshot.points, self._asked(points), k))

    def identify(self, points: Tensor) -> list[dict[str, Any]]:
        """Return label, guess, probability, score, margin and nearest images of each point (n, D)."""
        queries = self._asked(points)  # before the rule, which needs labels
        identified = self.snapshot.identifier.answers(queries, [None] * len(points))
        neighbor_lists = _nearest(identified.neighbors)
        return [
            {**{name: getattr(answer, name) for name in SENT}, "nearest": neighbors}
            for answer, neighbors in zip(identified.answers, neighbor_lists, strict=True)
        ]

    def verify(self, points: Tensor) -> dict[str, Any]:
        """Return the similarity of two points, and whether it reaches the threshold of the calibrated run."""
        similarity = float(self.embedder.similarity(points[:1].numpy(), points[1:].numpy())[0, 0])
        threshold = threshold_value(self.run, self.snapshot.manifest.model.fingerprint)
        return {
            "similarity": similarity,
            "threshold": threshold,
            "same": None if threshold is None else similarity >= threshold,
        }

    def add(self, files: Sequence[tuple[str, bytes]], label: str) -> dict[str, Any]:
        """Add images, given by their names and contents, to the gallery; it keeps them in its folder ``uploads``."""
        label, folder = stated_label(label, "label"), self.source / UPLOADS
        names, listed, new, twins = dict[str, str](), list[LabelledImage](), list[Path](), list[str]()
        with writing(folder):
            folder.mkdir(exist_ok=True)
            for name, content in files:
                suffix = Path(name).suffix.lower()
                suffix = suffix if suffix in EXTENSIONS else ".jpg"
                place = folder / f"{hashlib.sha256(content).hexdigest()[:32]}{suffix}"
                path = os.path.abspath(place)  # noqa: PTH100 - as galleries name it
                if path in names:
                    twins.append(f"{name}: the same picture as {names[path]}")
                    continue
                listed.append(LabelledImage(path, label))
                names[path] = name
                if not place.exists():
                    with atomic_write(place) as partial:
                        partial.write_bytes(content)
                    new.append(place)
        added = 0
        try:
            change = add_images(self.source, listed, trained=self.embedder.trained, model=self.chosen)
            added = change.added
        finally:
            if added < len(new):  # but another process may have added the same image meanwhile
                stored = set(map(os.path.basename, GalleryFolder(self.source).paths))
                for place in new:
                    if place.name not in stored:
                        place.unlink(missing_ok=True)
        messages = [*change.repeated, *change.skipped]
        for path, name in names.items():
            messages = [message.replace(path, name) for message in messages]
        return {"added": change.added, "messages": [*twins, *messages], "version": self.reopen()}

    def add_listed(self, images: Sequence[LabelledImage]) -> dict[str, Any]:
        """Add image files to the gallery on the calling thread, with a model of its own."""
        torch.set_num_threads(1)  # of this thread: requests need the other cores
        change = add_images(self.source, images, model=self.chosen)
        return {"added": change.added, "messages": [*change.repeated, *change.skipped]}

    def reopen(self) -> int:
        """Open the newest version of the gallery, and return its number."""
        stamp, gallery = self._stamp(), GalleryFolder(self.source)
        if gallery.manifest.model != self.snapshot.manifest.model:
            raise UserError(f"{self.source}: this gallery has embeddings of another model now; start the server again")
        self.snapshot = Snapshot(gallery, stamp)
        return gallery.version

    def _work(self, tasks: Sequence[Task]) -> None:
        """Embed the images of some tasks in one batch, and do their work; requests that were given up are left out."""
        tasks = [task for task in tasks if task.done.set_running_or_notify_cancel()]
        try:
            images = [image for task in tasks for image in task.images]
            points = torch.from_numpy(self._embed(images))
            if (stamp := self._stamp()) != self.snapshot.stamp:  # another process has changed it
                if self.kind == "gallery":
                    self.reopen()
                else:
                    self.snapshot = Snapshot(self.snapshot.loaded, stamp)
        except BaseException as error:  # each request reports it
            for task in tasks:
                task.done.set_exception(error)
            return
        for task, task_points in zip(tasks, points.split([len(task.images) for task in tasks]), strict=True):
            try:
                task.done.set_result(task.work(task_points))
            except BaseException as error:
                task.done.set_exception(error)

    def _embed(self, images: Sequence[Pixels]) -> NDArray[np.float32]:
        """Return the points (n, D) of images.

        Where each core gets at least two, it computes them alone: threads that share an operation wait for each other
        whenever one of them waits for requests, which need the same cores.
        """
        if self._parts == 1 or len(images) < 2 * self._parts:
            return self.embedder.embed(images)
        ends = np.linspace(0, len(images), self._parts + 1).round().astype(int)
        parts = (images[start:end] for start, end in pairwise(ends))
        return np.concatenate(list(self._pool.map(self.embedder.embed, parts)))

    def _stamp(self) -> list[Stamp]:
        """Return what changes when a gallery or its calibration, or that of the run, does."""
        return self._stamp_of_source() + self._stamp_of_run()

    def _stamp_of_source(self) -> list[Stamp]:
        return _stamps(self.source / GALLERY_MARK, self.source / IDENTIFICATION)

    def _stamp_of_run(self) -> list[Stamp]:
        return [] if self.run is None else _stamps(RunFolder(self.run).threshold_path)

    def _asked(self, points: Tensor) -> PointsInMemory:
        searched, count = self.snapshot.points, len(points)
        if not len(searched):
            is_gallery = self.kind == "gallery"
            text = "this gallery is empty; add images first"
            raise UserError(f"{self.source}: {text if is_gallery else 'has no images; serve a gallery of this model'}")
        return PointsInMemory("request", searched.manifold, points, [""] * count, [None] * count)


def _nearest(answers: Answers) -> list[list[dict[str, Any]]]:
    return [[neighbor.plain() for neighbor in neighbors] for _, neighbors in answers.neighbors()]


def _stamps(*paths: Path) -> list[Stamp]:
    """Return the stamps of the files that exist."""
    stamps = list[Stamp]()
    for path in paths:
        with suppress(OSError):
            status = path.stat()
            stamps.append((path.name, status.st_ino, status.st_mtime_ns, status.st_size))
    return stamps
