"""The images of a run's split are embedded once: what one command has computed the others read, equal to the bit."""

import json
import os
import shutil
from collections.abc import Callable
from errno import ENOSPC, EROFS
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from dmlkit.datasets.files.boxes import Boxes
from dmlkit.distributed.launch import start_ranks
from dmlkit.model import EmbeddingModel
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors import fill, store, stored
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.in_memory import Embeddings, embed_images
from dmlkit.vectors.run import EmbedOptions, embed
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import load_model
from tests.conftest import TINY_RECIPE, Cli
from tests.datasets import trees
from tests.processes import command_line, run_on_ranks
from tests.vectors.stored import check_imports
from tests.vectors.test_store import alter

CLASSES, PER_CLASS = 12, 5
TEST = CLASSES // 2 * PER_CLASS  # images of the test split
SPLITS = ("train", "validation", "test", "all")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``run``, trained on the JPEGs in ``photos``; paths are relative to their folder."""
    from dmlkit.recipe.file import parse_recipe
    from dmlkit.training.train import train

    home = tmp_path_factory.mktemp("trained")
    for label in range(CLASSES):
        for index in range(PER_CLASS):
            trees.photo(home / "photos" / f"{label:02}" / f"{index}.jpg", 100 * label + index)
    head, _, tail = TINY_RECIPE.partition("dataset:")
    recipe = head + "dataset: {name: folder, root: photos, validation_fraction: 0.34}" + tail[tail.index("\n") :]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        train(parse_recipe(recipe.replace("epochs: 3", "epochs: 1, workers: 0"), "r.yaml"), Path("run"), device="cpu")
    return home


@pytest.fixture
def home(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ``trained``, of the same files by their times, as the working directory."""
    shutil.copytree(trained, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


Count = Callable[[], int]


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Return the number of images that models have embedded since the last call."""
    sizes, forward = list[int](), EmbeddingModel.forward
    monkeypatch.setattr(EmbeddingModel, "forward", lambda self, x: sizes.append(len(x)) or forward(self, x))

    def count() -> int:
        total = sum(sizes)
        sizes.clear()
        return total

    return count


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings so far."""
    texts: list[str] = []
    for module in (stored, store):
        monkeypatch.setattr(module, "warn", texts.append)
    return texts


def ask(split: Any = "test", run: str = "run", overrides: list[str] | None = None) -> Embeddings:
    ranks = start_ranks("cpu")
    model = load_model(RunFolder(Path(run)), ranks, overrides=overrides or [])
    return split_embeddings(RunFolder(Path(run)), model, ranks, model.recipe.dataset.build(split), split)


def anew(split: Any = "test") -> Embeddings:
    """Without the run's folder."""
    ranks = start_ranks("cpu")
    model = load_model(RunFolder(Path("run")), ranks)
    return embed_images(model, ranks, model.recipe.dataset.build(split), "photos")


def same(one: Embeddings, other: Embeddings) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one[:3], other[:3], strict=True)) and one.faults == other.faults


COMMANDS = (
    ("eval run --json", 0),
    ("eval run --split train --json", 0),
    ("calibrate run --far 0.3", 0),
    ("inspect run -o x.html", 0),
    ("plot pca run", 0),
    ("plot retrieval run", 0),
    ("plot histogram run", TEST),  # by the model before training
    ("plot histogram run", 0),
    ("cluster run -k 3", 0),
    ("duplicates run --threshold 0.9", 0),
    ("curvature run", 3 * PER_CLASS),  # the training images by the model before training
    ("curvature run", 0),
    ("search run photos/00/0.jpg --json", 0),
    ("search run run --json", 0),
    ("identify run photos/00/0.jpg -o x.csv", 0),
    ("embed run --split test", 0),
)
"""How many images a command embeds where the run has embedded its splits."""


def test_no_command_embeds_an_image_of_a_split_again(home, dmlkit, embedded, warned, monkeypatch):
    save = Figure.savefig  # of an empty picture: to draw the others takes half of the time
    monkeypatch.setattr(Figure, "savefig", lambda self, *place, **options: save(Figure((1, 1)), *place, **options))
    for split in SPLITS:
        ask(split)
    embedded()
    for words, images in COMMANDS:
        dmlkit(*words.split(), *(() if "calibrate" in words else ("--device", "cpu"))).ok()
        assert embedded() == images and not warned, words


@pytest.mark.parametrize("split", SPLITS)
def test_what_is_read_is_equal_to_the_bit(split: Any, home: Path, warned: list[str]):
    expected = anew(split)
    assert same(ask(split), expected) and same(ask(split), expected) and not warned
    embed(Path("run"), split=split, device="cpu")
    folder = EmbeddingFolder(home / "run" / "embeddings" / split)
    np.testing.assert_array_equal(folder.points, expected.points.numpy())
    images = RunFolder(home / "run").recipe().dataset.build(split)
    assert folder.paths == list(images.paths)
    assert folder.labels == [images.class_names[label] for label in images.labels.tolist()]


def change_photo(home: Path) -> None:
    trees.photo(home / "photos" / "11" / "0.jpg", 999)


def relabel_photo(home: Path) -> None:
    (home / "photos" / "11" / "0.jpg").rename(home / "photos" / "10" / "9.jpg")


def train_further(home: Path, checkpoints: tuple[str, ...] = ("best", "last")) -> None:
    for name in checkpoints:
        path = home / "run" / "checkpoints" / f"{name}.pt"
        state = torch.load(path, weights_only=True)
        for tensor in state["model"].values():
            if tensor.is_floating_point():
                tensor += 0.01
        torch.save(state, path)


def resize(home: Path) -> None:
    path = home / "run" / "recipe.yaml"
    path.write_text(path.read_text().replace("  size: 16", "  size: 18"))


def test_what_has_changed_is_embedded_again_equal_to_the_bit(home: Path, embedded: Count, warned: list[str]):
    """Of a photo the batch that it is in."""
    for change in (change_photo, relabel_photo, train_further, resize):
        ask()
        embedded()
        change(home)
        found = ask()
        assert embedded() == len(found.points) and not warned, change
        assert same(found, anew())
        embedded()
        assert same(ask(), found) and embedded() == 0


def test_what_other_commands_have_embedded_does_not_change_a_split(home: Path, embedded: Count):
    """They embed the same photos in other batches: up to rounding the same, while a split is the same to the bit."""
    embed(Path("run"), Path("photos"), output=Path("all"), device="cpu")
    embedded()
    assert same(ask(), anew()) and embedded() == 2 * TEST


def points_by_path(folder: Path) -> dict[str, np.ndarray]:
    opened = EmbeddingFolder(folder)
    return {os.path.realpath(path): point for path, point in zip(opened.paths, np.array(opened.points), strict=True)}


def split_by_path() -> dict[str, np.ndarray]:
    embed(Path("run"), split="test", device="cpu")
    return points_by_path(Path("run/embeddings/test"))


def links(home: Path, name: str, classes: range) -> Path:
    """A folder of links to class folders: the same files under other names."""
    (home / name).mkdir()
    for label in classes:
        (home / name / f"{label:02}").symlink_to(home / "photos" / f"{label:02}")
    return Path(name)


def test_embed_reads_the_points_of_images_that_the_run_has(home: Path, embedded: Count, warned: list[str]):
    """All test images, in the batches of the split: equal to the bit to those computed without the run's folder."""
    folder = links(home, "again", range(CLASSES // 2, CLASSES))
    embed(Path("run"), folder, output=Path("fresh"), device="cpu")
    shutil.rmtree("run/vectors")
    ask()
    embedded()
    embed(Path("run"), folder, output=Path("read"), device="cpu")
    assert embedded() == 0 and not warned
    for name in ("embeddings.npy", "items.parquet"):
        assert Path("read", name).read_bytes() == Path("fresh", name).read_bytes()


def test_only_what_the_run_lacks_is_embedded(home: Path, embedded: Count, warned: list[str]):
    """In other batches float32 sums are rounded otherwise: a few times 6e-8, relative to unit vectors."""
    embed(Path("run"), Path("photos"), output=Path("fresh"), device="cpu")
    shutil.rmtree("run/vectors")
    ask("test")
    embedded()
    embed(Path("run"), Path("photos"), output=Path("read"), device="cpu")
    assert embedded() == CLASSES * PER_CLASS - TEST and not warned
    fresh, read = points_by_path(Path("fresh")), points_by_path(Path("read"))
    assert list(fresh) == list(read) and len(read) == CLASSES * PER_CLASS
    np.testing.assert_allclose(np.stack([*read.values()]), np.stack([*fresh.values()]), atol=1e-6)
    assert all(np.array_equal(read[path], point) for path, point in split_by_path().items())


def test_a_gallery_and_queries_read_the_points_too(home: Path, dmlkit: Cli, embedded: Count):
    from dmlkit.gallery.folder import GalleryFolder

    ask("test")
    embedded()
    assert dmlkit("gallery", "create", "run", "photos", "-o", "g", "--device", "cpu").code == 0
    assert embedded() == CLASSES * PER_CLASS - TEST
    gallery, stored = GalleryFolder(Path("g")), split_by_path()
    found = dict(zip(gallery.paths, torch.cat([*gallery.blocks(1000)]).numpy(), strict=True))
    assert all(np.array_equal(found[path], point) for path, point in stored.items())
    for words in (("search", "g", "photos/11/0.jpg"), ("identify", "g", "photos/10")):
        assert dmlkit(*words, "--device", "cpu").code == 0 and embedded() == 0


def test_select_and_search_read_the_images_that_embed_has_stored_in_the_run(home, dmlkit, embedded, warned):
    new = [trees.photo(home / "new" / f"{index}.jpg", 900 + index) for index in range(3)]
    commands = [text.split() for text in ("select run new --split test -n 2 --json", "search run new --json")]
    fresh = [dmlkit(*words, "--device", "cpu").out for words in commands]
    assert dmlkit("embed", "run", "new", "--device", "cpu").code == 0
    embedded()
    assert [dmlkit(*words, "--device", "cpu").out for words in commands] == fresh and embedded() == 0
    trees.photo(new[0], 999)
    assert dmlkit(*commands[0], "--device", "cpu").code == 0 and embedded() == 1
    assert not warned


def test_boxes_of_a_folder_are_not_taken_for_whole_images(home: Path):
    images, boxes = Path("photos/11"), Boxes(Path("labels"))
    Path("labels").mkdir()
    for path in images.iterdir():
        Path("labels", f"{path.stem}.txt").write_text("0 0.3 0.3 0.5 0.5\n")
    for name, chosen in (("box", boxes), ("whole", None)):  # with nothing stored
        embed(Path("run"), images, output=Path(name), device="cpu", options=EmbedOptions(boxes=chosen))
    ask()
    embed(Path("run"), images, output=Path("read"), device="cpu", options=EmbedOptions(boxes=boxes))
    box, whole = np.load("box/embeddings.npy"), np.load("whole/embeddings.npy")
    np.testing.assert_allclose(np.load("read/embeddings.npy"), box, atol=1e-6)
    assert np.abs(box - whole).max() > 1e-3


def test_commands_that_read_stored_embeddings_import_no_network(home: Path):
    ask("train"), ask()
    commands = ("eval run", "inspect run -o x.html", "cluster run -k 3", "duplicates run --threshold 0.9")
    check_imports("torchvision timm torch._dynamo", *commands, "search run photos/11/0.jpg")


@pytest.mark.parametrize("damage", ["changed", "no model"])
def test_a_damaged_part_is_embedded_again(damage: str, home: Path, embedded: Count, warned: list[str]):
    expected = ask()
    (part,) = Path("run/vectors").glob("*/*.safetensors")
    alter(part) if damage == "changed" else part.with_name("model.json").unlink()
    embedded()
    assert same(ask(), expected)
    assert embedded() == (TEST if damage == "changed" else 0)
    assert [str(part) in line for line in warned] == [True] * (damage == "changed")
    assert same(ask(), expected) and embedded() == 0


@pytest.mark.parametrize(("errno", "place"), [(ENOSPC, "write"), (EROFS, "mkdir")])
def test_where_nothing_can_be_written_the_answer_is_the_same(errno, place, home, monkeypatch, warned, embedded):
    expected = anew()
    embedded()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno, os.strerror(errno))

    with monkeypatch.context() as patch:
        patch.setattr(*((fill, "write_part") if place == "write" else (Path, "mkdir")), fail)
        for number in (1, 2):
            assert same(ask(), expected) and embedded() == TEST * (1 + (place == "write"))
            assert len(warned) == number and os.strerror(errno) in warned[-1]
            assert warned[-1].endswith("; the embeddings are not stored, and the next command embeds the images again")
    assert not list((home / "run").glob("vectors/*/*.safetensors"))
    assert same(ask(), expected) and embedded() == TEST
    assert same(ask(), expected) and embedded() == 0


def test_two_commands_at_once_embed_once(home: Path, embedded: Count):
    barrier, found = Barrier(2), list[Embeddings]()

    def command() -> None:
        barrier.wait()
        found.append(ask())

    threads = [Thread(target=command) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert embedded() == TEST and same(*found) and same(found[0], anew())
    assert len(list(Path("run/vectors").glob("*/*"))) == 2


def test_images_that_cannot_be_read_are_left_out_until_they_can(home: Path, embedded: Count, warned: list[str]):
    broken = home / "photos" / "09" / "2.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(b"no image")
    first = ask()
    assert embedded() == TEST - 1 and len(first.faults) == 1 and same(first, anew())
    embedded()
    assert same(ask(), first) and embedded() == 0 and not warned
    status = broken.stat()
    broken.write_bytes(whole)
    assert same(ask(), anew()) and embedded() == 2 * TEST
    broken.write_bytes(b"no image")
    os.utime(broken, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert same(ask(), first) and embedded() == 0 and not warned


def test_a_disk_that_failed_for_a_moment_is_asked_again(home, embedded, warned, monkeypatch):
    """The file has the same size and time."""
    from dmlkit.datasets.files.listing import ListedImages
    from dmlkit.files.image_file import BadImageError

    sample = ListedImages.sample

    def failing(self: Any, index: int) -> Tensor:
        if index == 3:
            raise BadImageError(f"{self.paths[index]}: Input/output error")
        return sample(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(ListedImages, "sample", failing)
        assert len(ask().points) == TEST - 1
    embedded()
    assert len(ask().points) == TEST and embedded() == 1 and not warned


def test_embed_counts_missing_images_before_it_reads_any(home: Path, dmlkit: Cli):
    """With five of them; --skip-bad-images skips them, and entries of a table that are wrong."""
    there = [f"{path.relative_to(home)},x" for path in sorted((home / "photos").rglob("*.jpg"))[:6]]
    lines = ["path,label", *there, *(f"photos/none{number}.jpg,x" for number in range(7))]
    Path("t.csv").write_text("\n".join(lines))
    words = ("embed", "run", "t.csv", "-o", "out", "--device", "cpu")
    result = dmlkit(*words)
    line = " ".join(result.err.split())
    assert result.code == 2 and "photos/none0.jpg: no such file; 7 of the 13 images of t.csv are missing, also" in line
    assert "none4.jpg and 2 more: restore them" in line and "none5" not in line and "--skip-bad-images" in line
    Path("t.csv").write_text("\n".join([*lines, "../x.jpg,x"]))
    result = dmlkit(*words, "--skip-bad-images")
    assert result.code == 0 and "7 images could not be read" in result.out and "leads out of the root" in result.err
    assert len(EmbeddingFolder(Path("out"))) == 6


def test_embed_adds_the_threshold_of_a_calibration_since(home: Path, embedded: Count):
    from dmlkit.evaluation.calibration import calibrate_run

    found = embed(Path("run"), split="test", device="cpu")
    assert found is not None and found.threshold is None
    calibrate_run(Path("run"), far=0.3, ranks=start_ranks("cpu"))
    embedded()
    manifest = embed(Path("run"), split="test", device="cpu")
    assert manifest is not None and manifest.threshold is not None and embedded() == 0
    assert manifest.threshold.threshold == json.loads(Path("run/threshold.json").read_text())["threshold"]
    assert EmbeddingFolder(Path("run/embeddings/test")).manifest.plain() == manifest.plain()


def test_images_in_a_folder_named_as_a_split_have_their_own_place(home: Path):
    shutil.copytree(home / "photos" / "00", home / "test")
    embed(Path("run"), Path("test"), device="cpu")
    assert [path.name for path in Path("run/embeddings").iterdir()] == ["test-images"]


def test_embeddings_by_another_checkpoint_have_their_own_place(home: Path):
    for checkpoint in (None, "last"):
        embed(Path("run"), Path("photos"), device="cpu", options=EmbedOptions(checkpoint=checkpoint))
    written = {path.name: EmbeddingFolder(path).manifest.model.checkpoint for path in Path("run/embeddings").iterdir()}
    assert written == {"photos": "best", "photos-last": "last"}


def test_each_checkpoint_and_transform_is_embedded_once(home: Path, dmlkit: Cli, embedded: Count, warned: list[str]):
    train_further(home, ("last",))
    asked: tuple[list[str], ...] = ([], ["--checkpoint", "last"], ["--set", "transform.size=18"])
    for words in asked:
        assert dmlkit("eval", "run", *words).code == 0 and embedded() == TEST
    shutil.rmtree("run/evaluations")
    for words in asked:
        assert dmlkit("eval", "run", *words).code == 0 and embedded() == 0
    assert not warned and len(list(Path("run/vectors").iterdir())) == 3


@pytest.mark.slow
def test_two_ranks_store_what_one_process_does(home: Path, embedded: Count):
    """300 images, so that each has a whole batch and one has a part of one."""
    for index in range(PER_CLASS, 50):
        for label in range(CLASSES // 2, CLASSES):
            trees.photo(home / "photos" / f"{label:02}" / f"{index}.jpg", 100 * label + index)
    words = ("eval", str(home / "run"), "--device", "cpu", "--set", f"dataset.root={home / 'photos'}")
    first, second = run_on_ranks(2, command_line, *words)
    assert "300 queries" in first and not second
    embedded()
    assert same(ask(overrides=[f"dataset.root={home / 'photos'}"]), anew()) and embedded() == 300
