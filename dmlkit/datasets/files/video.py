"""Frames of a video, as images of one group."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.errors import UserError
from dmlkit.files.image_file import BadImageError

VIDEOS = frozenset({".mp4", ".mov", ".m4v", ".avi", ".mkv", ".webm"})
RATE = 2.0  # frames per second
MOST = 256  # frames; of a video longer than 128 s, they are evenly spread


def is_video(path: Path) -> bool:
    """Return whether a file is a video, by its name."""
    return path.suffix.lower() in VIDEOS and not path.is_dir()


class VideoFrames(Dataset):
    """Frames of a video without labels, `RATE` per second and at most `MOST`, each named ``VIDEO/SECONDS``.

    They are fastest in their order: the video is decoded from the frame that was read last.

    Args:
        path: the file.

    Raises:
        UserError: PyAV is not installed, the file is missing or no video, or it has no frames.
    """

    in_memory = True  # so that one process reads them in their order

    def __init__(self, path: Path) -> None:
        self.path, self.times = path, frame_times(path)
        names = [f"{path}/{seconds - self.times[0]:.2f}" for seconds in self.times]
        super().__init__(torch.full((len(names),), -1), [], names)
        self.last, self.decoded = -1, iter(())

    def sample(self, index: int) -> Tensor:
        if index <= self.last:
            self.last, self.decoded = -1, iter(())
        if self.last < 0:
            self.decoded = self._decode()
        self.last = index
        for seconds, pixels in self.decoded:
            if seconds >= self.times[index]:
                return pixels()
        raise BadImageError(f"{self.paths[index]}: cannot read this frame: the video ends before it")

    def _decode(self) -> Iterator[tuple[float, Any]]:
        """Yield the time of each frame, and a function that returns its pixels (3, H, W), upright."""
        try:
            with _opened(self.path) as video:
                for frame in video.decode(video=0):
                    yield frame.time, lambda frame=frame: upright(frame)
        except UserError:
            raise
        except Exception as error:  # PyAV has many kinds, and some are only Exception
            raise BadImageError(f"{self.path}: cannot decode this video: {_reason(error)}") from error


def upright(frame: Any) -> Tensor:
    """Return the pixels (3, H, W) uint8 of a frame of PyAV, turned as its video says."""
    pixels = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
    return torch.rot90(pixels, round(getattr(frame, "rotation", 0) / 90), [1, 2])


def frame_times(path: Path) -> list[float]:
    """Return the times in seconds of the frames to read, without decoding any.

    Raises:
        UserError: see `VideoFrames`.
    """
    try:
        with _opened(path) as video:
            packets = video.demux(video=0) if video.streams.video else ()
            times = sorted(float(one.pts * one.time_base) for one in packets if one.pts is not None)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path}: cannot read this video: {_reason(error)}") from error
    if not times:
        raise UserError(f"{path}: this video has no frames")
    step = max(1 / RATE, (times[-1] - times[0]) / (MOST - 1))
    chosen: list[float] = []
    for seconds in times:
        if seconds >= times[0] + len(chosen) * step - 1e-6:
            chosen.append(seconds)
    return chosen


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _opened(path: Path) -> Any:
    """Open a video with PyAV.

    Raises:
        UserError: PyAV is not installed.
    """
    try:
        av: Any = import_module("av")
    except ImportError:
        raise UserError(f"{path}: frames of a video need PyAV; install it with: pip install 'dmlkit[video]'") from None
    av.logging.set_level(av.logging.FATAL)
    return av.open(str(path))
