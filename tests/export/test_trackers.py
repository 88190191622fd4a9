"""Exported models inside the trackers of Ultralytics and BoxMOT: their features are the embeddings of the run.

Both packages are in the environment of ``make test-trackers`` alone: they bring their own versions of much else.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ONE_EPOCH, Cli

SIDE, STEP, FRAMES = 32, 2, 6  # pixels of an individual, and by which it moves per frame
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _no_settings_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let Ultralytics write its settings elsewhere, install nothing and open no connection."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOLO_CONFIG_DIR", str(tmp_path_factory.mktemp("ultralytics")))
        patch.setenv("YOLO_AUTOINSTALL", "false")
        patch.setenv("YOLO_OFFLINE", "true")
        for name in ("ultralytics.trackers.bot_sort", "boxmot"):
            pytest.importorskip(name, reason="the trackers are in the environment of make test-trackers")
        yield


@pytest.fixture(scope="module")
def run(trained_once: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    bigger = ONE_EPOCH.replace("size: 16", f"size: {SIDE}").replace("name: plain,", "name: plain, channels: bgr,")
    return trained_once(tmp_path_factory.mktemp("tracked"), bigger)


@pytest.fixture(scope="module")
def video(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, np.ndarray]:
    """Return the frames (F, H, W, 3) BGR of a video that OpenCV wrote and read, and the corners (F, N, 2) in them."""
    import cv2

    from dmlkit.run_folder.folder import RunFolder

    dataset = RunFolder(run).recipe().dataset.build("test")
    individuals = [dataset.sample(row).permute(1, 2, 0).numpy()[..., ::-1] for row in range(0, len(dataset), 6)]
    starts = np.array([(20 + 50 * place, 12 + 7 * place) for place in range(len(individuals))])
    corners = starts + STEP * np.arange(FRAMES)[:, None, None]
    path = tmp_path_factory.mktemp("video") / "video.avi"
    height, width = corners[..., 1].max() + SIDE + 9, corners[..., 0].max() + SIDE + 9
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, (int(width), int(height)))
    for places in corners:
        frame = np.full((height, width, 3), 127, np.uint8)
        for individual, (x, y) in zip(individuals, places, strict=True):
            frame[y : y + SIDE, x : x + SIDE] = individual
        writer.write(frame)
    writer.release()
    reader = cv2.VideoCapture(str(path))
    return np.stack([reader.read()[1] for _ in range(FRAMES)]), corners


@pytest.fixture
def embedded(run: Path, video: tuple[np.ndarray, np.ndarray], tmp_path: Path, dmlkit: Cli) -> Any:
    """Return what ``dmlkit embed`` makes of the individuals of each frame, (F, N, D)."""
    frames, corners = video
    (tmp_path / "crops").mkdir()
    for number, (frame, places) in enumerate(zip(frames, corners, strict=True)):
        for place, (x, y) in enumerate(places):
            crop = np.ascontiguousarray(frame[y : y + SIDE, x : x + SIDE, ::-1])
            Image.fromarray(crop).save(tmp_path / "crops" / f"{number:02}-{place:02}.png")
    dmlkit("embed", run, tmp_path / "crops", "-o", tmp_path / "embeddings", "--device", "cpu").ok()
    return np.load(tmp_path / "embeddings" / "embeddings.npy").reshape(*corners.shape[:2], -1)


def cosine(features: Any, expected: np.ndarray) -> float:
    return float(features @ expected / np.linalg.norm(features) / np.linalg.norm(expected))


def test_ultralytics(run: Path, video: Any, embedded: np.ndarray, tmp_path: Path, dmlkit: Cli):
    from ultralytics.engine.results import Boxes
    from ultralytics.trackers.bot_sort import BOTSORT
    from ultralytics.utils import YAML, IterableSimpleNamespace
    from ultralytics.utils.checks import check_yaml

    model = tmp_path / "tracker.onnx"
    assert dmlkit("export", run, "--format", "onnx", "--input", "tracker", "-o", model).code == 0
    (tmp_path / "tracker.yaml").write_text(
        Path(check_yaml("botsort.yaml")).read_text()
        + f"\nwith_reid: true\nmodel: {model}\ngmc_method: none\ndevice: cpu\n"
    )
    settings = YAML.load(tmp_path / "tracker.yaml")
    tracker = BOTSORT(IterableSimpleNamespace(**settings))
    assert tracker.encoder.imgsz == (SIDE, SIDE) and tracker.encoder.batch_size is None
    frames, corners = video
    width = (SIDE + 0.5 - 10) / 1.02  # it adds 2 % and 10 pixels to a box, and drops what is less than a pixel
    ids: list[list[int]] = []
    for frame, places, expected in zip(frames, corners, embedded, strict=True):
        middles = places + (SIDE + 1) / 2
        boxes = np.concatenate([middles - width / 2, middles + width / 2, np.full((len(places), 2), (0.9, 0))], axis=1)
        rows = tracker.update(Boxes(boxes.astype(np.float32), frame.shape[:2]), frame)
        ids.append([int(row[4]) for row in sorted(rows, key=lambda row: row[7])])
        for track in tracker.tracked_stracks:
            assert cosine(track.curr_feat, expected[int(track.idx)]) >= 0.9999
    assert len(set(ids[0])) == len(corners[0]) and ids == [ids[0]] * FRAMES


def test_boxmot(run: Path, video: Any, embedded: np.ndarray, tmp_path: Path, dmlkit: Cli):
    from boxmot import BotSort

    frames, corners = video
    for takes, least in (("normalized", 0.9999), ("tracker", -1.0)):
        model = tmp_path / f"{takes}.onnx"
        assert dmlkit("export", run, "--format", "onnx", "--input", takes, "-o", model).code == 0
        tracker, cosines = BotSort(reid_weights=model, use_cmc=False), list[float]()
        ids: list[list[int]] = []
        for frame, places, expected in zip(frames, corners, embedded, strict=True):
            boxes = np.concatenate([places, places + SIDE, np.full((len(places), 2), (0.9, 0))], axis=1)
            rows = tracker.update(boxes.astype(np.float32), frame)
            ids.append([int(row[4]) for row in sorted(rows, key=lambda row: row[7])])
            cosines += [cosine(track.curr_feat, expected[int(track.det_ind)]) for track in tracker.active_tracks]
        assert len(set(ids[0])) == len(corners[0]) and ids == [ids[0]] * FRAMES
        assert len(cosines) == FRAMES * len(corners[0]) and min(cosines) >= least
        # BoxMOT normalizes by ImageNet's statistics whatever the file is: pixels in 0..1 are not what it gives
        assert takes == "normalized" or min(cosines) < 0.9999
