"""Embeddings in parts: every engine, and any death and restart on the way, ends in the same files to the byte."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import save

from dmlkit.distributed.launch import start_fabric
from dmlkit.errors import UserError
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.images import dataset_of
from dmlkit.vectors.in_memory import embed_dataset
from dmlkit.vectors.job import EmbedJob, PartEmbedder, embed_job
from dmlkit.vectors.parts import Part, PartFolder
from dmlkit.vectors.run import EmbedOptions
from dmlkit.vectors.run import embed as embed_images
from dmlkit.vectors.trained import load_model
from tests.conftest import END, ROOT, TINY_RECIPE
from tests.processes import command_line, start_ranks

FILES = ["embeddings.npy", "items.parquet", "manifest.json"]
IMAGES = 300  # three parts: two of 128, one of 44


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``run``, a trained tiny model, and ``photos``."""

    from dmlkit.recipe.file import parse_recipe
    from dmlkit.training.train import train

    home = tmp_path_factory.mktemp("home")
    recipe = parse_recipe(TINY_RECIPE.replace("epochs: 3", "epochs: 1, workers: 0"), "tiny.yaml")
    train(recipe, home / "run", device=start_fabric("cpu"))
    (home / "photos").mkdir()
    for index, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (IMAGES, 16, 16, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(home / "photos" / f"{index:03}.png")
    return home


def embed(home: Path, output: Path, *, photos: Path | None = None, skip: bool = False) -> None:
    options = EmbedOptions(skip_bad_images=skip)
    embed_images(home / "run", photos or home / "photos", output=output, device="cpu", options=options)


def contents(folder: Path) -> dict[str, bytes]:
    """The files, without the run's place in the manifest, which depends on the folder."""
    assert sorted(path.name for path in folder.iterdir()) == FILES  # and nothing that was needed on the way
    found = {name: (folder / name).read_bytes() for name in FILES}
    return {**found, "manifest.json": re.sub(rb'  "run": (null|\{[^}]*\}),\n', b"", found["manifest.json"])}


@pytest.fixture(scope="module")
def unbroken(home: Path) -> dict[str, bytes]:
    embed(home, home / "unbroken")
    return contents(home / "unbroken")


def test_parts_cover_every_image_once():
    for images in (0, 1, 127, 128, 129, 8192, 60_502, 1_000_003):
        parts = PartFolder(Path("any"), images)
        covered = [index for part in range(len(parts)) for batch in parts.batches(part) for index, _ in batch]
        assert covered == list(range(images))
        assert all(1 <= len(parts.images(part)) <= 8192 for part in range(len(parts)))
        assert len(parts) >= min(33, -(-images // 128))  # enough for some workers to share


def test_parts_in_a_row_are_the_list_embedded_in_one_go(home, unbroken):
    trained = load_model(RunFolder(home / "run"), start_fabric("cpu"))
    dataset = dataset_of(home / "photos", "test", trained.recipe)
    whole = embed_dataset(start_fabric("cpu"), trained.model, dataset, trained.recipe.transform, workers=0)
    np.testing.assert_array_equal(np.load(home / "unbroken" / "embeddings.npy"), whole.points.numpy())
    items = parquet.read_table(home / "unbroken" / "items.parquet").to_pydict()
    paths = [str(home / "photos" / f"{index:03}.png") for index in range(IMAGES)]
    files = [Path(path).stat() for path in paths]
    stamps = {"bytes": [file.st_size for file in files], "modified": [file.st_mtime_ns for file in files]}
    assert items == {"id": list(range(IMAGES)), "path": paths, "label": [None] * IMAGES, **stamps}
    manifest = json.loads(unbroken["manifest.json"])
    assert manifest["count"] == IMAGES and manifest["skipped"] == []
    assert manifest["model"]["fingerprint"] == trained.model.fingerprint()


@pytest.mark.parametrize("name", ["embeddings.npy", "items.parquet", "parts/part-00000.safetensors"])
def test_files_of_somebody_else_are_refused_d7(name: str, home, tmp_path, dmlkit):
    theirs = tmp_path / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("theirs")
    (tmp_path / "parts").mkdir(exist_ok=True)
    (tmp_path / "parts" / ".mine.partial").write_text("theirs")
    result = dmlkit("embed", home / "run", home / "photos", "-o", tmp_path, "--device", "cpu")
    assert (
        result.code == 2
        and f"has {name.split('/')[0]} but not interrupted embeddings; choose another --output" in result.err
    )
    assert theirs.read_text() == (tmp_path / "parts" / ".mine.partial").read_text() == "theirs"


def test_a_worker_computes_one_part_after_another(home, unbroken, tmp_path):
    trained = load_model(RunFolder(home / "run"), start_fabric("cpu"))
    dataset = dataset_of(home / "photos", "test", trained.recipe)
    job = EmbedJob(dataset, str(home / "photos"), tmp_path, skip_bad_images=False)
    job.parts.begin(job.describe(trained))
    worker = PartEmbedder(job, trained, start_fabric("cpu"), workers=2)  # as beside a GPU: their readers stay
    told: list[int] = []
    for number in (2, 0, 1):
        worker([number], told.append)
    assert told == [44, 128, 128]
    assert not job.parts.missing(range(3), 8, skip_bad_images=False)
    embed(home, tmp_path)
    assert contents(tmp_path) == unbroken


def lives(step: int, action: Callable[[], None]) -> bool:
    """Whether a child process that does this lives: at its ``step``-th renaming or removal of a file it is killed."""

    def child() -> None:
        steps = count(1)

        def or_die(original: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*arguments: Any, **options: Any) -> Any:
                if next(steps) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            return counted

        Path.replace, Path.unlink = or_die(Path.replace), or_die(Path.unlink)
        action()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(END)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the parts that this process writes."""
    numbers: list[int] = []
    write = PartFolder.write
    monkeypatch.setattr(PartFolder, "write", lambda *a: (numbers.append(a[1]), write(*a)))
    return numbers


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has loaded torch")
def test_killed_anywhere_the_same_command_goes_on(home, unbroken, written, tmp_path):
    for step in count(1):
        output = tmp_path / str(step)
        if lives(step, lambda output=output: embed(home, output)):
            break
        written.clear()
        if (output / "manifest.json").exists():
            with pytest.raises(UserError, match="npy already; choose another"):
                embed(home, output)
        else:
            complete = {int(path.stem[5:]) for path in output.glob("parts/part-*")}
            embed(home, output)
            assert written == sorted({0, 1, 2} - complete)
        assert contents(output) == unbroken, f"killed at step {step}"
    assert step > 18  # 7 files are renamed, 7 times a partial one is cleared away, 4 files are removed


class StoppedError(Exception):
    pass


def embed_until(last: int, home: Path, output: Path, **options) -> None:
    """Embed, but stop before a part after ``last`` is written."""
    write = PartFolder.write

    def guarded(parts: PartFolder, number: int, content) -> None:
        if number > last:
            raise StoppedError
        write(parts, number, content)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(PartFolder, "write", guarded)
        embed(home, output, **options)
    assert len(list((output / "parts").glob("*.safetensors"))) == last + 1


def test_a_damaged_part_is_computed_again(home, unbroken, written, tmp_path):
    embed_until(0, home, tmp_path)
    with (tmp_path / "parts" / "part-00000.safetensors").open("rb+") as file:
        file.truncate(2000)
    written.clear()
    embed(home, tmp_path)
    assert written == [0, 1, 2] and contents(tmp_path) == unbroken


def zeros(count: int, dim: int = 8) -> torch.Tensor:
    return torch.zeros(count, dim)


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({"points": zeros(3), "indices": torch.arange(3)}, {"faults": "[]"}),  # 3 rows for 128
        ({"points": zeros(128, 5), "indices": torch.arange(128)}, {"faults": "[]"}),
        ({"points": zeros(128).double(), "indices": torch.arange(128)}, {"faults": "[]"}),
        ({"points": zeros(128), "indices": torch.arange(128).int()}, {"faults": "[]"}),
        ({"points": zeros(128), "indices": torch.arange(128) + 1}, {"faults": "[]"}),
        ({"points": zeros(128), "indices": torch.zeros(128, dtype=torch.int64)}, {"faults": "[]"}),
        ({"points": zeros(128), "indices": torch.arange(128).flip(0)}, {"faults": "[]"}),
        ({"points": zeros(128), "indices": torch.arange(128) * 2**40}, {"faults": "[]"}),
        ({"points": zeros(128) / 0, "indices": torch.arange(128)}, {"faults": "[]"}),
        ({"points": zeros(128), "indices": torch.arange(128)}, {"faults": '["one too many"]'}),
        ({"points": zeros(127), "indices": torch.arange(127)}, {"faults": "[3]"}),
        ({"points": zeros(128), "indices": torch.arange(128)}, {"faults": "{}"}),
        ({"points": zeros(128), "indices": torch.arange(128)}, {"faults": "no JSON"}),
        ({"points": zeros(128), "indices": torch.arange(128)}, {}),
        ({"points": zeros(128), "indices": torch.arange(128)}, None),
        ({"points": zeros(128), "rows": torch.arange(128)}, {"faults": "[]"}),
    ],
)
@pytest.mark.parametrize("skip", [False, True])
def test_a_part_that_is_none_is_computed_again_s11(home, tensors, metadata, skip, tmp_path):
    parts = PartFolder(tmp_path, IMAGES)
    parts.path.mkdir()
    parts.file(0).write_bytes(save(tensors, metadata))
    assert parts.missing([0], 8, skip_bad_images=skip) == [0]
    good = Part(zeros(127), torch.arange(1, 128), ["000.png: cannot read this image"])
    parts.write(0, good)
    assert parts.missing([0], 8, skip_bad_images=skip) == ([] if skip else [0])


def test_embeddings_with_parts_of_somebody_else_are_the_same_s11(home, unbroken, written, tmp_path):
    embed_until(0, home, tmp_path)
    tensors = {"points": torch.zeros(3, 8), "indices": torch.arange(3)}
    (tmp_path / "parts" / "part-00000.safetensors").write_bytes(save(tensors, {"faults": "[]"}))
    os.mkfifo(tmp_path / "parts" / "part-00001.safetensors")
    written.clear()
    embed(home, tmp_path)
    assert written == [0, 1, 2] and contents(tmp_path) == unbroken


def test_two_commands_at_once_leave_whole_files(home, unbroken, tmp_path, monkeypatch):
    write = PartFolder.write

    def overtaken(parts: PartFolder, number: int, content) -> None:
        monkeypatch.setattr(PartFolder, "write", write)
        embed(home, tmp_path)  # the other command, from beginning to end
        write(parts, number, content)

    monkeypatch.setattr(PartFolder, "write", overtaken)
    with pytest.raises(UserError, match="another dmlkit embed process has just finished this folder"):
        embed(home, tmp_path)
    assert contents(tmp_path) == unbroken


def test_parts_of_other_embeddings_are_refused_with_what_differs(home, tmp_path):
    output = tmp_path / "out"
    embed_until(0, home, output)
    photos = tmp_path / "photos"
    shutil.copytree(home / "photos", photos)
    with pytest.raises(UserError, match=r"\(source: was \S+, now \S+photos; another list of images\); undo"):
        embed(home, output, photos=photos)
    state = torch.load(home / "run" / "checkpoints" / "best.pt", weights_only=True)
    state["model"]["head.linear.bias"] += 0.01
    shutil.copytree(home / "run", tmp_path / "run")
    torch.save(state, tmp_path / "run" / "checkpoints" / "best.pt")
    with pytest.raises(UserError, match=r"\(other weights\); undo this change"):
        embed_images(tmp_path / "run", home / "photos", output=output, device="cpu")
    for content in ("{", "[]", "null"):
        (output / "parts" / "job.json").write_text(content)
        with pytest.raises(UserError, match=r"job\.json: cannot read it.*remove .*parts to start again"):
            embed(home, output)


def test_bad_images_stop_or_are_left_out_and_a_mended_one_is_taken(home, unbroken, written, tmp_path):
    photos = tmp_path / "photos"
    shutil.copytree(home / "photos", photos)
    bad = photos / "200.png"  # in the second part
    good = bad.read_bytes()
    bad.write_bytes(b"no")
    output = tmp_path / "out"
    with pytest.raises(UserError, match=r"200\.png.*--skip-bad-images"):
        embed(home, output, photos=photos)
    assert written == [0]
    embed_until(1, home, output, photos=photos, skip=True)  # goes on past the second part
    shutil.copytree(output, tmp_path / "skipped")
    embed(home, tmp_path / "skipped", photos=photos, skip=True)
    manifest = json.loads((tmp_path / "skipped" / "manifest.json").read_text())
    assert manifest["count"] == IMAGES - 1 and len(manifest["skipped"]) == 1 and "200.png" in manifest["skipped"][0]
    paths = parquet.read_table(tmp_path / "skipped" / "items.parquet")["path"].to_pylist()
    assert [Path(path).name for path in paths] == [f"{index:03}.png" for index in range(IMAGES) if index != 200]
    bad.write_bytes(good)
    written.clear()
    embed(home, output, photos=photos)
    assert written == [1, 2]  # where none may be left out, a part that lacks an image does not count
    assert (output / "embeddings.npy").read_bytes() == unbroken["embeddings.npy"]


def test_parts_that_do_not_arrive_are_told(home, tmp_path):
    trained = load_model(RunFolder(home / "run"), start_fabric("cpu"))
    dataset = dataset_of(home / "photos", "test", trained.recipe)
    job = EmbedJob(dataset, "photos", tmp_path / "out", skip_bad_images=False)
    nothing: dict[str, Any] = {"compute": lambda *_: None, "advance": lambda _: None, "say": lambda _: None}
    with pytest.raises(UserError, match=r"part-00000\.safetensors: missing, although a worker has written it"):
        embed_job(job, trained, start_fabric("cpu"), **nothing)
    job.parts.begin(job.describe(trained))
    shutil.rmtree(job.parts.path)
    with pytest.raises(UserError, match="not found by a process"):  # a rank that looks elsewhere
        job.parts.check(job.describe(trained))
    embed(home, tmp_path / "out")
    assert not job.parts.path.exists()
    job.parts.check(job.describe(trained))  # a rank without a share may look after the first one has finished


def test_output_that_is_a_file_is_refused(home, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="out: cannot write embeddings here"):
        embed(home, tmp_path / "out")


@pytest.mark.heavy
@pytest.mark.slow
def test_two_ranks_finish_what_one_process_began(home, unbroken, tmp_path, monkeypatch):
    embed_until(0, home, tmp_path)
    monkeypatch.chdir(home)
    words = ("embed", "run", str(home / "photos"), "-o", str(tmp_path), "--device", "cpu")
    first, second = start_ranks(2, command_line, *words)
    assert first.splitlines() == [
        "1 of 3 parts were complete already",
        f"300 embeddings of 8 dimensions in {tmp_path}",
    ]
    assert not second
    assert contents(tmp_path) == unbroken


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
@pytest.mark.slow
def test_ray_equals_one_process_and_tells_a_users_mistake(home, unbroken, tmp_path, ray_environment: None):
    pytest.importorskip("ray.data", reason="the extra dmlkit[ray] is not installed")
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        output, on_ray = tmp_path / "out", EmbedOptions(engine="ray")
        embed_until(0, home, output)
        embed_images(home / "run", home / "photos", output=output, device="cpu", options=on_ray)
        assert contents(output) == unbroken
        photos = tmp_path / "photos"
        photos.mkdir()
        (photos / "broken.jpg").write_bytes(b"no")
        with pytest.raises(UserError, match=r"broken\.jpg"):
            embed_images(home / "run", photos, output=tmp_path / "broken", device="cpu", options=on_ray)
        with pytest.raises(UserError, match="no machine of this Ray cluster has a GPU"):
            embed_images(home / "run", photos, output=tmp_path / "broken", device="cuda", options=on_ray)
    finally:
        ray.shutdown()


def test_engines_that_do_not_fit_are_refused(dmlkit, home, tmp_path, monkeypatch):
    command = ("embed", home / "run", home / "photos", "-o", tmp_path / "out", "--device", "cpu", "--engine")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    result = dmlkit(*command, "torchrun")
    assert result.code == 2 and "torchrun --nproc-per-node=N -m dmlkit embed" in result.err
    monkeypatch.setitem(sys.modules, "ray", None)
    result = dmlkit(*command, "ray")
    assert result.code == 2 and "pip install 'dmlkit[ray]'" in result.err
    for name, value in {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    for engine in ("local", "ray"):
        result = dmlkit(*command, engine)
        assert result.code == 2 and "torchrun has started 2 processes; remove --engine" in result.err
    assert not (tmp_path / "out").exists()
