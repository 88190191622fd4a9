"""Embeddings as files: one process, ranks or Ray, and any death and restart, end in the same files to the byte."""

import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors import fill
from dmlkit.vectors import run as run_module
from dmlkit.vectors.images import dataset_of
from dmlkit.vectors.in_memory import embed_dataset
from dmlkit.vectors.run import EmbedOptions, RayWorker
from dmlkit.vectors.run import embed as embed_images
from dmlkit.vectors.store import image_keys, stored_model
from dmlkit.vectors.trained import load_model
from tests.conftest import END, ROOT, refuses
from tests.datasets import trees
from tests.processes import KILLED, Forked, command_line, end_before_change, run_on_ranks

FILES = ["embeddings.npy", "items.parquet", "manifest.json"]
IMAGES = 300  # three parts: two of 128, one of 44


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    """A folder with ``run``, a trained tiny model, and ``photos``."""
    home = trained_once(tmp_path_factory.mktemp("home")).parent
    trees.photos(home / "photos", (f"{index:03}.png" for index in range(IMAGES)), side=(16, 16))
    return home


def embed(home: Path, output: Path, *, photos: Path | None = None, skip: bool = False) -> None:
    options = EmbedOptions(skip_bad_images=skip)
    embed_images(home / "run", photos or home / "photos", output=output, device="cpu", options=options)


def contents(folder: Path) -> dict[str, bytes]:
    """The files, without the run's place in the manifest, which depends on the folder."""
    assert sorted(path.name for path in folder.iterdir()) == FILES  # and nothing that was needed on the way
    found = {name: (folder / name).read_bytes() for name in FILES}
    return {**found, "manifest.json": re.sub(rb'  "run": (null|"[^"]*"),\n', b"", found["manifest.json"])}


@pytest.fixture(scope="module")
def unbroken(home: Path) -> dict[str, bytes]:
    embed(home, home / "unbroken")
    return contents(home / "unbroken")


def test_parts_in_a_row_are_the_list_embedded_in_one_go(home, unbroken):
    trained = load_model(RunFolder(home / "run"), start_ranks("cpu"))
    dataset = dataset_of(home / "photos", "test", trained.recipe)
    whole = embed_dataset(start_ranks("cpu"), trained.model, dataset, trained.recipe.transform, workers=0)
    np.testing.assert_array_equal(np.load(home / "unbroken" / "embeddings.npy"), whole.points.numpy())
    items = parquet.read_table(home / "unbroken" / "items.parquet").to_pydict()
    paths = [str(home / "photos" / f"{index:03}.png") for index in range(IMAGES)]
    assert items == {"id": list(range(IMAGES)), "path": paths, "label": [None] * IMAGES}
    manifest = json.loads(unbroken["manifest.json"])
    assert manifest["count"] == IMAGES and manifest["skipped"] == []
    assert manifest["model"]["fingerprint"] == trained.model.fingerprint()


@pytest.mark.parametrize("name", ["embeddings.npy", "manifest.json"])
def test_files_of_somebody_else_are_refused(name: str, home, tmp_path, dmlkit):
    (tmp_path / name).write_text("{}")
    reason = "got one without a format" if name == "manifest.json" else f"has {name} but not embeddings; choose another"
    dmlkit("embed", home / "run", home / "photos", "-o", tmp_path, "--device", "cpu").refused(reason)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["{}"]


def test_a_folder_of_embeddings_is_written_again_but_not_by_default_with_other_images(home, unbroken, tmp_path):
    out, others = tmp_path / "out", tmp_path / "others" / "photos"
    others.mkdir(parents=True)
    shutil.copy(home / "photos" / "000.png", others)
    run = tmp_path / "run"
    shutil.copytree(home / "run", run)
    embed_images(run, others, output=out, device="cpu")
    (out / "mine.txt").write_text("mine")
    embed(home, out)
    assert (out / "mine.txt").read_text() == "mine"
    (out / "mine.txt").unlink()
    assert contents(out) == unbroken
    embed_images(run, others, device="cpu")
    message = r"embeddings/photos: has embeddings of \S+others/photos; choose another"
    refuses(message, embed_images, run, home / "photos", device="cpu")


def test_what_stops_the_last_file_does_not_stop_the_same_command(home, unbroken, tmp_path, monkeypatch):
    """Neither in a new folder nor in one of embeddings: Ctrl-C, or a full disk, while the items are written."""

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(run_module, "_write_items", stopped)
            embed(home, tmp_path / "out")
        embed(home, tmp_path / "out")
        assert contents(tmp_path / "out") == unbroken


def test_a_run_that_cannot_be_written_embeds_too(home, unbroken, tmp_path, monkeypatch):
    mkdir = Path.mkdir

    def refused(self: Path, *arguments: Any, **options: Any) -> None:
        if self.is_relative_to(home / "run"):
            raise OSError(30, os.strerror(30))
        mkdir(self, *arguments, **options)

    shutil.rmtree(home / "run" / "vectors")
    monkeypatch.setattr(Path, "mkdir", refused)
    embed(home, tmp_path)
    assert contents(tmp_path) == unbroken


def embed_or_die(step: int, home: Path, output: Path, photos: Path) -> None:
    end_before_change(step)
    embed(home, output, photos=photos)


def parts_of(run: Path) -> list[Path]:
    return sorted(run.glob("vectors/*/*.safetensors"))


@pytest.fixture
def fresh(home: Path, tmp_path: Path) -> Path:
    """Another home with the same photos, whose run has embedded nothing."""
    place = tmp_path / "fresh"
    place.mkdir()
    shutil.copytree(home / "run", place / "run", ignore=shutil.ignore_patterns("vectors", "embeddings"))
    (place / "photos").symlink_to(home / "photos")
    return place


@pytest.mark.heavy
def test_killed_anywhere_the_same_command_goes_on(fresh, unbroken, computed, tmp_path):
    """A kill costs one part, and the files are the same to the byte."""
    photos = (fresh / "photos").resolve()
    for step in count(1):
        output = tmp_path / str(step)
        shutil.rmtree(fresh / "run" / "vectors", ignore_errors=True)
        process = Forked(embed_or_die, step, fresh, output, photos)
        if process.wait(END) == 0:
            break
        assert process.returncode == KILLED, process.communicate()[0]
        computed.clear()
        complete = len(parts_of(fresh / "run"))
        embed(fresh, output, photos=photos)
        assert len(computed) == 3 - complete and contents(output) == unbroken, f"killed at step {step}"
        assert not list((fresh / "run" / "vectors").rglob("*.partial"))
    assert step > 7  # 7 files are renamed


class StoppedError(Exception):
    pass


def embed_until(last: int, home: Path, output: Path, **options) -> None:
    """Embed, but stop before a part after ``last`` is written."""
    write, numbers = fill.write_part, count()

    def guarded(*arguments: Any) -> None:
        if next(numbers) > last:
            raise StoppedError
        write(*arguments)

    before = len(parts_of(home / "run"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(fill, "write_part", guarded)
        embed(home, output, **options)
    assert len(parts_of(home / "run")) == before + last + 1


def test_two_commands_at_once_leave_whole_files(fresh, home, unbroken, tmp_path, monkeypatch):
    """The second one, of other images in part, runs from beginning to end within the first."""
    write, outputs = fill.write_part, [tmp_path / "one", tmp_path / "two"]

    def overtaken(*arguments: Any) -> None:
        monkeypatch.setattr(fill, "write_part", write)
        embed(fresh, outputs[1], photos=home / "photos" / "000.png")
        write(*arguments)

    monkeypatch.setattr(fill, "write_part", overtaken)
    embed(fresh, outputs[0], photos=home / "photos")
    assert contents(outputs[0]) == unbroken and len(np.load(outputs[1] / "embeddings.npy")) == 1


def test_bad_images_stop_or_are_left_out_and_a_repaired_one_is_taken(fresh, home, unbroken, computed, tmp_path):
    photos = tmp_path / "photos"
    shutil.copytree(home / "photos", photos)
    bad = photos / "200.png"  # in the second part
    good = bad.read_bytes()
    bad.write_bytes(b"no")
    output = tmp_path / "out"
    refuses(r"200\.png.*--skip-bad-images", embed, fresh, output, photos=photos)
    assert len(parts_of(fresh / "run")) == 1
    embed_until(0, fresh, output, photos=photos, skip=True)  # goes on past the second part
    embed(fresh, output, photos=photos, skip=True)
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["count"] == IMAGES - 1 and len(manifest["skipped"]) == 1 and "200.png" in manifest["skipped"][0]
    paths = parquet.read_table(output / "items.parquet")["path"].to_pylist()
    assert [Path(path).name for path in paths] == [f"{index:03}.png" for index in range(IMAGES) if index != 200]
    refuses(r"200\.png.*--skip-bad-images", embed, fresh, output, photos=photos)
    bad.write_bytes(good)
    computed.clear()
    embed(fresh, output, photos=photos)
    assert computed == [1]
    found, expected = np.load(output / "embeddings.npy"), np.load(home / "unbroken" / "embeddings.npy")
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.array_equal(np.delete(found, range(128, 256), 0), np.delete(expected, range(128, 256), 0))


@pytest.mark.heavy
def test_two_ranks_finish_what_one_process_began(fresh, home, unbroken, tmp_path):
    output = tmp_path / "out"
    embed_until(0, fresh, output, photos=home / "photos")
    words = ("embed", str(fresh / "run"), str(home / "photos"), "-o", str(output), "--device", "cpu")
    first, second = run_on_ranks(2, command_line, *words)
    said = f"300 embeddings of 8 dimensions in {output}"
    assert first.splitlines() == ["128 of 300 images were embedded already", said]
    assert not second
    assert contents(output) == unbroken


@pytest.fixture(scope="module")
def ray_environment() -> Iterator[None]:
    """Ray for tests: it starts on a slow machine too, and kills no worker because others fill the memory."""
    pytest.importorskip("ray", reason="the extra dmlkit[ray] is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ADDRESS", "local")  # not a cluster that happens to run here
        patch.setenv("PYTHONPATH", str(ROOT))  # for the workers
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        patch.setenv("RAY_gcs_server_port_wait_time_s", f"{END:g}")
        patch.setenv("RAY_worker_register_timeout_seconds", f"{END:g}")
        yield


@pytest.mark.heavy
def test_ray_equals_one_process_and_tells_a_users_mistake(fresh, home, unbroken, tmp_path, ray_environment: None):
    pytest.importorskip("ray.data", reason="the extra dmlkit[ray] is not installed")
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        output, on_ray = tmp_path / "out", EmbedOptions(ray=True)
        embed_until(0, fresh, output, photos=home / "photos")
        embed_images(fresh / "run", home / "photos", output=output, device="cpu", options=on_ray)
        assert contents(output) == unbroken
        photos = tmp_path / "photos"
        photos.mkdir()
        (photos / "broken.jpg").write_bytes(b"no")
        for device, message in (("cpu", r"broken\.jpg"), ("cuda", "no machine of this Ray cluster has a GPU")):
            options: Any = {"output": tmp_path / "broken", "device": device, "options": on_ray}
            refuses(message, embed_images, home / "run", photos, **options)
    finally:
        ray.shutdown()


def test_ray_that_does_not_fit_is_refused(dmlkit, home, tmp_path, monkeypatch):
    command = ("embed", home / "run", home / "photos", "-o", tmp_path / "out", "--device", "cpu", "--ray")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    dmlkit(*command).refused("pip install 'dmlkit[ray]'")
    for name, value in {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    dmlkit(*command).refused("torchrun has started this process; remove --ray")
    assert not (tmp_path / "out").exists()


def test_an_image_that_again_cannot_be_read_was_not_embedded_before(files: Path, tmp_path: Path):
    said = list[str]()
    (files / "photos" / "A" / "0.png").write_bytes(b"no image")
    options: Any = {"device": "cpu", "options": EmbedOptions(skip_bad_images=True), "say": said.append}
    for _ in range(2):
        embed_images(files / "run", files / "photos", output=tmp_path / "out", **options)
    assert said == ["39 of 40 images were embedded already"]


def test_a_second_command_waits_for_points_that_lie_in_the_output(files: Path, tmp_path: Path, monkeypatch):
    """Where the run cannot be written, they go with the command that has embedded them."""
    write, filled, has_read = run_module.write_embeddings, run_module.fill, Event()
    output, second = tmp_path / "out", list[Future[Any]]()

    def command() -> object:
        return embed_images(files / "run", files / "photos", output=output, device="cpu")

    def fill_and_tell(*arguments: Any, **options: Any) -> Any:
        found = filled(*arguments, **options)
        if second:
            has_read.set()
        return found

    def write_while_the_second_reads(*arguments: Any) -> Any:
        if not second:
            second.append(pool.submit(command))
            has_read.wait(1)
        return write(*arguments)

    monkeypatch.setattr(run_module, "_home", lambda run, place: place / "vectors")
    monkeypatch.setattr(run_module, "fill", fill_and_tell)
    monkeypatch.setattr(run_module, "write_embeddings", write_while_the_second_reads)
    with ThreadPoolExecutor(1) as pool:
        manifest = command()
        assert second[0].result(END) == manifest
    assert sorted(path.name for path in output.iterdir()) == FILES


def test_points_in_the_output_stay_until_every_rank_has_seen_them(files: Path, tmp_path: Path, monkeypatch):
    """A rank that looks for them later would wait for ever."""
    output, there = tmp_path / "out", list[list[Path]]()
    monkeypatch.setattr(run_module, "_home", lambda run, place: place / "vectors")
    monkeypatch.setattr(Ranks, "barrier", lambda self: there.append(parts_of(output)))
    embed_images(files / "run", files / "photos", output=output, device="cpu")
    assert there and there[-1] and not parts_of(output)


def test_images_are_told_apart_by_their_place_and_not_by_how_it_is_written(files: Path, tmp_path: Path, monkeypatch):
    for name in ("one", "two"):
        shutil.copytree(files / "photos" / "A", tmp_path / name / "photos")
    monkeypatch.chdir(tmp_path / "one")
    for images in (Path("photos"), tmp_path / "one" / "photos", Path("photos")):
        embed_images(files / "run", images, device="cpu")
    monkeypatch.chdir(tmp_path / "two")
    message = f"has embeddings of {tmp_path / 'one' / 'photos'}; choose"
    refuses(message, embed_images, files / "run", Path("photos"), device="cpu")


def test_a_worker_of_ray_reads_images_with_the_changes_of_the_dataset(files: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda job: job))
    trained = load_model(RunFolder(Path("run")), start_ranks("cpu"))
    dataset = dataset_of(Path("photos"), "test", trained.recipe)
    job = fill.FillJob(dataset, image_keys(dataset), tmp_path, stored_model(trained))
    job.path.mkdir()
    job.model.write(job.path / fill.MODEL)
    load = partial(load_model, RunFolder(Path("run")), checkpoint="best", overrides=["dataset.max_pixels=77"])
    worker = RayWorker(job, pickle.loads(pickle.dumps(load)), "cpu", 1, Path.cwd())
    assert worker.fault == "" and dataset.max_pixels == 77
