"""Decoding of image files to RGB, and of the frames of a video."""

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.samples import SIDE, ImageSamples
from dmlkit.errors import UserError
from dmlkit.files.image_file import MAX_PIXELS, BadImageError, Box, decoding, limit_size, opened, to_rgb

# a new interpreter imports torch first, 5 to 9 s, and the runs of study --workers would start theirs; Python 3.14 does
# so unless another way is asked for
WORKER_START = "fork" if sys.platform == "linux" else None
ROUNDING = 1.0  # pixels by which a box may exceed its image, because shares are written with few digits


def read_image(path: str | Path, box: Box | None = None, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Decode an image file, or a box of it, to (3, H, W) uint8 RGB, upright.

    Gray, palette and CMYK images are converted, more than 8 bits are scaled (see `to_rgb`), transparent pixels are
    blended with white, the EXIF rotation is applied, and an animation gives its first frame.

    Args:
        max_pixels: largest number of decoded pixels; a JPEG of more is decoded at a smaller size, see `limit_size`.

    Raises:
        BadImageError: the file is missing, not regular, empty, damaged, truncated, too large, or not an image, or the
            box is not inside the image.
    """
    with decoding(path):
        return decode_image(path, None, box, max_pixels)


def decoded_pixels(path: str | Path, content: bytes | None = None, max_pixels: int = MAX_PIXELS) -> int:
    """Return how many pixels `decode_image` holds for a full image, from its header alone."""
    with decoding(path), opened(path, content) as image:
        limit_size(path, image, max_pixels, is_whole=True)
        return image.width * image.height


def decode_image(path: str | Path, content: bytes | None, box: Box | None, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Decode an image like `read_image`, from ``content`` or, if that is None, from the file.

    Errors of decoders are not converted; see `decoding`.
    """
    with opened(path, content) as image:
        is_smaller = limit_size(path, image, max_pixels, is_whole=box is None)
        is_color = image.format == "JPEG" and image.mode == "RGB"
        with _turns[-1].for_pixels(image.width * image.height) if _turns else nullcontext():
            if box is None and is_color and not is_smaller and (decode_jpeg := jpeg_decoder()):
                encoded = Path(path).read_bytes() if content is None else content
                # a bytearray, because torch warns about read-only bytes
                return decode_jpeg(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
            pixels = to_rgb(path, image, lambda image: image if box is None else crop_box(image, box, path))
    return torch.from_numpy(pixels).permute(2, 0, 1)


class Turns:
    """Bound on the pixels that the processes of one loader decode at once; a larger image waits for all others.

    Eight processes decode images of 24 megapixels without waiting, and two those of 80, which take 1.4 GB each. Images
    of less than a ``unit`` never wait.
    """

    def __init__(self, most: int = 200_000_000, unit: int = 8_000_000) -> None:
        context = get_context(WORKER_START)
        self.count, self.unit = most // unit, unit
        self.entry, self.units = context.Lock(), context.Semaphore(self.count)

    @contextmanager
    def for_pixels(self, pixels: int) -> Generator[None]:
        """Run the block when so many pixels may be decoded."""
        units = min(pixels // self.unit, self.count)
        if units:
            with self.entry:  # two processes that each have a part of their units would wait for each other
                for _ in range(units):
                    self.units.acquire()
        try:
            yield
        finally:
            for _ in range(units):
                self.units.release()


def take_turns(turns: Turns) -> None:
    """Let this process, a reader of a loader, decode within the bound that it shares with the others."""
    _turns.append(turns)


_turns: list[Turns] = []


@cache
def jpeg_decoder() -> Callable[[Tensor], Tensor] | None:
    """Return torchcodec's decoder of color JPEGs, or None where it is not installed or does not load.

    Its pixels, its use of the EXIF rotation and the damage that it accepts are Pillow's. It takes 0.53 instead of
    0.62 ms for 500 x 375 pixels and 1.6 instead of 2.1 ms for 1024 x 768 (one core).
    """
    try:
        return import_module("torchcodec.decoders").decode_jpeg
    except (ImportError, AttributeError, OSError, RuntimeError):  # also one before 0.16, or for another build of torch
        return None


def crop_box(image: Image.Image, box: Box, path: str | Path) -> Image.Image:
    """Crop an image to a box and its margin, rounded to integer pixels."""
    box = Box(*fitted(box[:4], path, image.width, image.height)[:4], box.margin)
    across, down = box.margin * (box.right - box.left), box.margin * (box.bottom - box.top)
    sides = (
        max(0, round(box.left - across)),
        max(0, round(box.top - down)),
        min(image.width, round(box.right + across)),
        min(image.height, round(box.bottom + down)),
    )
    return image.crop(sides)


def fitted(sides: tuple[float, float, float, float], path: str | Path, width: int, height: int) -> Box:
    """Return a box in pixels, cut at the border of its image if it exceeds it by at most `ROUNDING`."""
    left, top, right, bottom = sides
    is_inside = min(left, top, width - right, height - bottom) >= -ROUNDING
    box = Box(max(0.0, left), max(0.0, top), min(float(width), right), min(float(height), bottom))
    if not is_inside or round(box.left) >= round(box.right) or round(box.top) >= round(box.bottom):
        wrong = f"not inside the {width} x {height} image"
        if is_inside:
            wrong = "empty; expected left < right and top < bottom in pixels"
        raise BadImageError(f"the box ({left:g}, {top:g}, {right:g}, {bottom:g}) of {path} is {wrong}")
    return box


def frames(path: str | Path) -> int:
    """Return the number of frames of an image file; an animation or a multi-page file has more than one.

    A photo with a preview or a second view for 3D, as phones and cameras write into one JPEG (MPO), has one.
    """
    with decoding(path), opened(path) as image:
        return 1 if image.format == "MPO" else getattr(image, "n_frames", 1)


def thumbnail(path: str | Path, box: Box | None = None, side: int = SIDE) -> bytes:
    """Return an image file, or a box of it, as a small JPEG; for errors see `read_image`."""
    return ImageSamples().picture(read_image(path, box), side)


FRAMES_PER_SECOND = 2.0
MOST_FRAMES = 256  # of a video longer than 128 s, they are evenly spread


class VideoFrames(Dataset):
    """Frames of a video without labels, `FRAMES_PER_SECOND` and at most `MOST_FRAMES`, each named ``VIDEO/SECONDS``.

    They are fastest in their order: the video is decoded from the frame that was read last.

    Raises:
        UserError: PyAV is not installed, the file is missing or no video, or it has no frames.
    """

    in_memory = True  # so that one process reads them in their order

    def __init__(self, path: Path) -> None:
        self.path, self.times = path, _frame_times(path)
        names = [f"{path}/{seconds - self.times[0]:.2f}" for seconds in self.times]
        super().__init__(torch.full((len(names),), -1), [], names)
        self.last, self.decoded = -1, iter(())

    def sample(self, index: int) -> Tensor:
        if index <= self.last:
            self.last, self.decoded = -1, iter(())
        if self.last < 0:
            self.decoded = self._decode()
        self.last = index
        for frame in self.decoded:
            if frame.time >= self.times[index]:
                pixels = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
                return torch.rot90(pixels, round(getattr(frame, "rotation", 0) / 90), [1, 2])  # upright
        raise BadImageError(f"{self.paths[index]}: cannot read this frame: the video ends before it")

    def _decode(self) -> Iterator[Any]:
        """Yield the frames."""
        with _video(self.path, BadImageError, "decode") as video:
            yield from video.decode(video=0)


def _frame_times(path: Path) -> list[float]:
    """Return the times in seconds of the frames to read, without decoding any."""
    with _video(path, UserError, "read") as video:
        packets = video.demux(video=0) if video.streams.video else ()
        times = sorted(float(packet.pts * packet.time_base) for packet in packets if packet.pts is not None)
    if not times:
        raise UserError(f"{path}: this video has no frames")
    step = max(1 / FRAMES_PER_SECOND, (times[-1] - times[0]) / (MOST_FRAMES - 1))
    chosen: list[float] = []
    for seconds in times:
        if seconds >= times[0] + len(chosen) * step - 1e-6:
            chosen.append(seconds)
    return chosen


@contextmanager
def _video(path: Path, kind: type[UserError], verb: str) -> Generator[Any]:
    """Open a video with PyAV; raise its errors as the given kind."""
    try:
        av: Any = import_module("av")
    except ImportError:
        raise UserError(f"{path}: frames of a video need PyAV; install it with: pip install 'dmlkit[video]'") from None
    av.logging.set_level(av.logging.FATAL)
    try:
        with av.open(str(path)) as video:
            yield video
    except Exception as error:  # PyAV has many kinds, and some are only Exception
        reason = getattr(error, "strerror", None) or error
        raise kind(f"{path}: cannot {verb} this video: {reason}") from error
