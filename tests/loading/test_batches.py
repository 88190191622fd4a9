"""How images are read: what readers wait for, what may become of an image, and what fails."""

import gc
import io
import multiprocessing
import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from torchvision.transforms import v2

from dmlkit.cli.app import USER_ERROR, message_of
from dmlkit.cli.console import Output
from dmlkit.cli.progress import TrainingProgress
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.glyphs import GlyphsConfig
from dmlkit.loading.batches import TimedBatches, default_workers, evaluation_loader, limit_workers
from dmlkit.loading.inputs import TransformedImages, check_resized
from dmlkit.run_folder.documents import EpochRow
from dmlkit.transforms.base import Resizing, TransformConfig
from dmlkit.vectors.images import ImageList


def test_time_in_the_loader_is_told_from_time_in_the_step(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr("dmlkit.loading.batches.perf_counter", lambda: clock[0])

    def loader() -> Any:
        for wait in (3.0, 0.5, 0.25):
            clock[0] += wait
            yield wait

    batches = TimedBatches(loader())
    for number, _ in enumerate(batches):
        clock[0] += 10 + number
    assert batches.seconds == 3.75


@pytest.mark.usefixtures("images_have_readers")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_loader_starts_no_more_processes_than_it_may_or_has_batches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dmlkit.loading.batches.count_cores", lambda: 64)
    data = GlyphsConfig(classes=4, images_per_class=6).build("test")
    data.in_memory = False
    assert evaluation_loader(data, None, batch_size=len(data) // 2 + 1).num_workers == 2
    assert evaluation_loader(data, None, batch_size=1, workers=3).num_workers == 3
    assert default_workers() == 8
    monkeypatch.setenv("WORLD_SIZE", "32")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "host"), ("MASTER_PORT", "9")):
        monkeypatch.setenv(name, value)
    assert default_workers() == 2  # the ranks of a machine share its cores
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    limit_workers(64 // 16)  # one of 16 trainings
    try:
        assert evaluation_loader(data, None, batch_size=1).num_workers == 4
    finally:
        limit_workers(8)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot fork safely")
def test_readers_are_forked_in_a_process_that_was_spawned(monkeypatch: pytest.MonkeyPatch):
    """A spawned one would import torch again: 9 s for every validation of a study with --workers."""
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: "spawn")
    loader = evaluation_loader(GlyphsConfig(classes=4, images_per_class=6).build("test"), None, workers=1)
    context: Any = loader.multiprocessing_context
    assert context.get_start_method() == "fork"


class Mourned:
    """Part of a cycle, which only the garbage collector removes; it notes the process that does."""

    def __init__(self, notes: Path) -> None:
        self.notes, self.itself = notes, self

    def __del__(self) -> None:
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()}\n")


class Collected(Dataset):
    """Six small images, each of which is read after the garbage was collected."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(6, dtype=torch.int64), ["one"], [f"{number}.png" for number in range(6)])

    def sample(self, index: int) -> torch.Tensor:
        gc.collect()
        return torch.zeros(3, 4, 4, dtype=torch.uint8)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork")
def test_a_reader_leaves_the_garbage_of_its_parent_alone(tmp_path: Path):
    """A reader that removed a video decoder of its parent waited without end for threads that were not forked."""
    gc.collect()
    gc.disable()
    try:
        Mourned(tmp_path / "notes")
        assert len(list(evaluation_loader(Collected(), None, workers=1))) == 1
        assert not (tmp_path / "notes").exists()
    finally:
        gc.enable()
    gc.collect()
    assert (tmp_path / "notes").read_text() == f"{os.getpid()}\n"


def check_reader_fails(advice: str) -> None:
    """Read glyphs by another process, whose error is reported to the user with advice."""
    loader = evaluation_loader(GlyphsConfig(classes=4, images_per_class=6).build("test"), None, workers=1)
    with pytest.raises(RuntimeError) as found:
        list(loader)
    text, code = message_of(found.value)
    assert code == USER_ERROR and advice in text


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork")
@pytest.mark.timeout(60)  # it waited for the batch without end
def test_a_reader_whose_shared_memory_is_full_is_an_error(monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </t>: No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)
    check_reader_fails("/dev/shm is full")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork")
def test_a_reader_whose_files_are_limited_is_an_error():
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # bytes; the batch of 12 glyphs has more
    try:
        check_reader_fails("ulimit -f")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("waiting", "is_reported"), [(0.0, False), (0.19, False), (0.2, True), (0.434, True)])
def test_a_slow_loader_is_told(monkeypatch: pytest.MonkeyPatch, waiting: float, is_reported: bool):
    screen = io.StringIO()
    monkeypatch.setattr(Output, "console", Console(file=screen, width=200))
    progress = TrainingProgress(epochs=2)
    row = EpochRow(epoch=1, loss=1.0, lr=0.1, images_per_second=10, waiting=waiting, seconds=1, validation=None)
    progress.epoch(row)
    assert ("of the time waiting for images" in screen.getvalue()) == is_reported
    assert (f"({waiting:.0%} " in screen.getvalue()) == is_reported


IMAGENET = TransformConfig.variants["imagenet"]


@pytest.mark.parametrize("resizing", [Resizing(31), Resizing(31, square=True)])
def test_sizes_are_torchvisions(resizing: Resizing):
    resize = v2.Resize((resizing.side,) * 2 if resizing.square else resizing.side)
    for height, width in product((1, 7, 30, 31, 32, 100), repeat=2):
        assert resizing.size_of(height, width) == resize(torch.zeros(3, height, width, dtype=torch.uint8)).shape[1:]


@pytest.mark.parametrize("shape", [(60_000, 2), (1, 65_000)])
@pytest.mark.parametrize("training", [False, True])
def test_a_long_thin_image_is_a_bad_one_before_it_is_resized_s3(shape: tuple[int, int], training: bool, tmp_path: Path):
    """196 bytes that would take 6 GB, and one of 65 000 pixels that would ask for 12 GB."""
    path = tmp_path / "thin.png"
    Image.new("1", shape).save(path)
    images = ImageList([str(path)])
    long = 256 * max(shape) // min(shape)
    message = f"{path}: the image of {shape[0]} x {shape[1]} pixels would have {max(256, long * (shape[0] > 9))} x "
    item = TransformedImages(images, IMAGENET(), training=training)[0, 0]
    assert item.input is None and item.fault.startswith(message), item.fault
    assert "resized to a shorter side of 256 pixels, bilinear; expected at most 80,000,000" in item.fault


def test_a_square_takes_any_shape():
    check_resized(torch.zeros(3, 1, 9).expand(3, 60_000, 9), Resizing(256, square=True), "thin.png")
    check_resized(torch.zeros(3, 1, 9).expand(3, 2_700, 9), Resizing(256), "thin.png")
