"""Galleries as random sequences of operations, next to a model in memory; and killed at random moments."""

import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dmlkit.errors import UserError
from dmlkit.files.labels import UNKNOWN
from dmlkit.gallery.change import add_images, compact_gallery, remove_images, rename_label, restore_version
from dmlkit.gallery.files import GallerySummary
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.images import LabelledImage
from dmlkit.gallery.index import index_gallery
from dmlkit.identify.identify import identify
from dmlkit.identify.rule import LabelRule
from dmlkit.identify.search import search
from dmlkit.vectors.run import embed
from tests.conftest import END
from tests.datasets import trees
from tests.fuzz.conftest import FULL, examples
from tests.gallery.test_faults import started
from tests.gallery.test_gallery import rows_of
from tests.gallery.test_index import stocked
from tests.processes import Forked
from tests.vectors.stored import ON_CPU

STOCK = 280  # images that an index can be learned from; nobody has their files
LABELS = ("crow", "dove", "c1", "c2")


@pytest.fixture(scope="module")
def home(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stocked gallery and folders of photos to add, each embedded."""
    folder = tmp_path_factory.mktemp("home")
    stocked(place, folder / "stock", rows=STOCK, dim=4)
    trees.photos(folder, (f"new{index // 2}/{index}.jpg" for index in range(8)), first=400, side=(40, 30))
    trees.photos(folder / "asked", (f"{index}.jpg" for index in range(4)), first=500, side=(40, 30))
    for name in ("asked", *(f"new{group}" for group in range(4))):
        embed(place / "run", folder / name, output=folder / f"{name}.points", device="cpu")
    return folder


def content(path: Path) -> dict[str, tuple[Any, ...]]:
    """What a gallery holds by id: label, path and point."""
    return {id: row[:3] for id, row in rows_of(path).items()}  # noqa: A001


def new_rows(home: Path, group: int, label: str) -> dict[str, tuple[Any, ...]]:
    """The rows of a folder of photos, as `dmlkit embed` has them."""
    points = np.load(home / f"new{group}.points" / "embeddings.npy").tolist()
    paths = sorted(str(path) for path in (home / f"new{group}").iterdir())
    return {LabelledImage(path, label).id(): (label, path, point) for path, point in zip(paths, points, strict=True)}


def distances(asked: np.ndarray, points: np.ndarray) -> np.ndarray:
    """In the ball of curvature -1."""
    squares = ((asked[:, None] - points) ** 2).sum(-1)
    room = (1 - (asked**2).sum(1))[:, None] * (1 - (points**2).sum(1))
    return np.arccosh(1 + 2 * squares / room)


class GalleryMachine(RuleBasedStateMachine):
    """A gallery, and a dict in its stead."""

    def __init__(self, home: Path, folder: Path) -> None:
        super().__init__()
        self.home, self.path = home, folder / "gallery"
        self.asked = np.load(home / "asked.points" / "embeddings.npy").astype(np.float64)

    @initialize()
    def create(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(self.home / "stock", self.path)
        self.model = content(self.path)
        self.versions = {GalleryFolder(self.path).version: self.model}

    def changed(self, model: dict[str, tuple[Any, ...]]) -> None:
        self.model = model
        self.versions[GalleryFolder(self.path).version] = model

    @rule(group=st.integers(0, 3), label=st.sampled_from(LABELS))
    def add(self, group: int, label: str) -> None:
        rows = new_rows(self.home, group, label)
        missing = {id: row for id, row in rows.items() if id not in self.model}  # noqa: A001
        incoming = add_images(self.path, self.home / f"new{group}", label=label, model=ON_CPU)
        assert (incoming.added, len(incoming.repeated)) == (len(missing), len(rows) - len(missing))
        self.changed(self.model | missing)

    @rule(label=st.sampled_from((*LABELS, "nobody")))
    def remove_label(self, label: str) -> None:
        self.remove("labels", [label], {id for id, row in self.model.items() if row[0] == label})  # noqa: A001

    @rule(data=st.data())
    @precondition(lambda self: self.model)
    def remove_id(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.model)))  # noqa: A001
        self.remove("images", [id], {id})

    @rule(data=st.data())
    @precondition(lambda self: self.model)
    def remove_path(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.model)))  # noqa: A001
        self.remove("images", [self.model[id][1]], {id})

    def remove(self, by: str, values: list[str], gone: set[str]) -> None:
        if not gone:
            with pytest.raises(UserError, match="nothing was removed"):
                remove_images(self.path, **{by: values})
            return
        assert remove_images(self.path, **{by: values}) == len(gone)
        self.changed({id: row for id, row in self.model.items() if id not in gone})  # noqa: A001

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.versions)))
        assert restore_version(self.path, version) == len(self.versions[version])
        self.changed(self.versions[version])

    @rule(version=st.integers(900, 1000))
    def restore_nothing(self, version: int) -> None:
        with pytest.raises(UserError, match=f"has no version {version}"):
            restore_version(self.path, version)

    @rule()
    def compact(self) -> None:
        compact_gallery(self.path)
        self.changed(self.model)

    # codes of products take 5 s to learn from so few images, these 5 ms
    @rule(kind=st.sampled_from(["int8", "ivf_hnsw_sq"]))
    def index(self, kind: Any) -> None:
        if len(self.model) < 256:
            with pytest.raises(UserError, match="too few for an index"):
                index_gallery(self.path, kind, 0.5)
        else:
            index_gallery(self.path, kind, 0.5)
            self.changed(self.model)

    @rule(k=st.integers(1, 300))
    def search(self, k: int) -> None:
        if not self.model:
            with pytest.raises(UserError, match="this gallery is empty"):
                search(self.path, self.home / "asked.points", k=k, method="exact")
            return
        ids = sorted(self.model)
        all_distances = distances(self.asked, np.array([self.model[id][2] for id in ids]))  # noqa: A001
        found = search(self.path, self.home / "asked.points", k=k, method="exact").plain()
        for query, row in zip(found["queries"], all_distances, strict=True):
            assert len(query["neighbors"]) == min(k, len(ids))
            np.testing.assert_allclose(
                [-neighbor["similarity"] for neighbor in query["neighbors"]], np.sort(row)[:k], rtol=1e-5, atol=1e-6
            )
            for neighbor in query["neighbors"]:
                label, path, _ = self.model[neighbor["id"]]
                assert (neighbor["label"], neighbor["path"]) == (label, path)
                assert -neighbor["similarity"] == pytest.approx(row[ids.index(neighbor["id"])], rel=1e-5, abs=1e-6)
        approximate = search(self.path, self.home / "asked.points", k=1).plain()
        assert all(neighbor["id"] in self.model for query in approximate["queries"] for neighbor in query["neighbors"])

    @rule(threshold=st.floats(-4, 0))
    def identify(self, threshold: float) -> None:
        if not self.model:
            with pytest.raises(UserError, match="this gallery is empty"):
                identify(self.path, self.home / "asked.points")
            return
        if GalleryFolder(self.path).approximate is not None:
            return  # which finds some of the nearest
        rows = list(self.model.values())
        near = distances(self.asked, np.array([row[2] for row in rows]))
        answers = identify(self.path, self.home / "asked.points", rule=LabelRule(threshold=threshold)).answers
        for answer, row in zip(answers, near, strict=True):
            best = int(row.argmin())
            assert answer.score == pytest.approx(-row[best], rel=1e-5)
            if abs(row[best] + threshold) > 1e-5:
                assert answer.label == (rows[best][0] if -row[best] >= threshold else UNKNOWN)

    @invariant()
    def is_as_the_model(self) -> None:
        if hasattr(self, "model"):
            gallery = GalleryFolder(self.path)
            gallery.check()
            after = content(self.path)
            assert {id: row[:2] for id, row in after.items()} == {id: row[:2] for id, row in self.model.items()}  # noqa: A001
            for id, (_, _, point) in after.items():  # noqa: A001
                assert point == pytest.approx(self.model[id][2], abs=1e-6)  # one image alone, or in a batch
            assert len(gallery) == len(self.model)
            numbers = {one.number: one.images for one in GallerySummary.of(self.path).versions}
            assert all(numbers[version] == len(rows) for version, rows in self.versions.items())


@pytest.mark.heavy
def test_any_sequence_of_operations_is_as_in_memory(home: Path, tmp_path: Path):
    run_state_machine_as_test(partial(GalleryMachine, home, tmp_path), settings=examples(4, 150))


def change(name: str, home: Path, gallery: Path, argument: Any) -> None:
    """One change of a gallery, in a process that may be killed."""
    match name:
        case "add":
            add_images(gallery, home / f"new{argument}", label="new", model=ON_CPU)
        case "remove":
            remove_images(gallery, images=argument)
        case "rename":
            rename_label(gallery, *argument)
        case "restore":
            restore_version(gallery, argument)
        case "compact":
            compact_gallery(gallery)
        case _:
            index_gallery(gallery, argument, 0.5)


def drawn(home: Path, gallery: Path, random: np.random.Generator) -> tuple[str, Any, dict[str, tuple[Any, ...]]]:
    """A change with its argument, and what the gallery holds after it."""
    before, versions = content(gallery), GallerySummary.of(gallery).versions
    name = str(random.choice(["add", "add", "remove", "remove", "rename", "restore", "compact", "index"]))
    group = int(random.integers(4))
    rows = {id: row for id, row in new_rows(home, group, "new").items() if id not in before}  # noqa: A001
    if name == "add" and rows:
        return "add", group, before | rows
    if name == "remove" and len(before) > 270:
        gone = [str(id) for id in random.choice(sorted(before), 3, replace=False)]  # noqa: A001
        return "remove", gone, {id: row for id, row in before.items() if id not in gone}  # noqa: A001
    if name == "rename":
        old, new = (str(random.choice(names)) for names in (sorted({row[0] for row in before.values()}), LABELS))
        rows = {key: (new if row[0] == old else row[0], *row[1:]) for key, row in before.items()}
        return "rename", (old, new), rows
    if name == "restore":
        version = versions[int(random.integers(len(versions)))].number
        copy = shutil.copytree(gallery, gallery.with_name("restored"))
        restore_version(copy, version)
        rows = content(copy)
        shutil.rmtree(copy)
        return "restore", version, rows
    if name == "index":
        return "index", str(random.choice(["ivf_pq", "ivf_hnsw_sq"])), before
    return "compact", None, before


@pytest.mark.heavy
def test_a_storm_of_kills_leaves_each_change_done_or_not(home: Path, tmp_path: Path):
    """Killed somewhere between its start and a little after the time that it takes; the gallery is never repaired."""
    gallery, random, kills = tmp_path / "gallery", np.random.default_rng(0), 100 if FULL else 5
    shutil.copytree(home / "stock", gallery)
    seconds: dict[str, float] = {}
    counts = dict.fromkeys(["killed", "before", "after", "ended"], 0)
    while counts["killed"] < kills:
        name, argument, after = drawn(home, gallery, random)
        before = content(gallery)
        process: Forked = started(partial(change, name, argument=argument), home, gallery)
        since = perf_counter()
        if name in seconds:
            sleep(float(random.uniform(0, 1.1)) * seconds[name])
            process.kill()
        code = process.wait(END)
        assert code in (0, -signal.SIGKILL), process.communicate()
        if code == 0:
            counts["ended"] += 1
            seconds[name] = perf_counter() - since
        gallery.with_suffix(".begun").unlink()
        found = content(gallery)  # no id is there twice, or it fails
        assert found in (before, after) and (code != 0 or found == after), (name, counts)
        GalleryFolder(gallery).check()
        if code != 0:
            counts["killed"] += 1
            if before != after:
                counts["after" if found == after else "before"] += 1
        if code != 0 and counts["killed"] % 10 == 0:  # and it is of use: searched, changed, and searched again
            some = sorted(found)[0]
            assert remove_images(gallery, images=[some]) == 1 and some not in content(gallery)
            restore_version(gallery, GallerySummary.of(gallery).versions[-2].number)
            assert content(gallery) == found
            neighbors = search(gallery, home / "asked.points", k=len(found), method="exact").plain()["queries"]
            assert all({near["id"] for near in query["neighbors"]} == set(found) for query in neighbors)
    sys.stdout.write(f"a storm on a gallery: {counts}; seconds of a change: {seconds}\n")
    assert counts["before"]  # few kills fall after the commit; those of `test_faults` at each change of the disk do
