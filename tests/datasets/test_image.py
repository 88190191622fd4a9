"""Decoding: every kind of image becomes upright 8-bit RGB with the colours that it shows."""

import os
import struct
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from itertools import product
from pathlib import Path
from threading import Lock
from time import sleep

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from dmlkit.datasets import FolderConfig
from dmlkit.datasets.files import image
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import Turns, decode_image, decoded_pixels, frames, read_image
from dmlkit.files.image_file import FORMATS, HEIF, MAX_PIXELS, MAX_SIDE, BadImageError, Box, decoding, upright_size
from dmlkit.files.regular import EXTENSIONS, HEIC
from dmlkit.identify.page import drawn_picture
from dmlkit.loading.batches import evaluation_loader
from dmlkit.recipe.file import parse_recipe
from dmlkit.vectors.embedder import GivenImages
from dmlkit.vectors.images import dataset_of
from tests.conftest import TINY_RECIPE
from tests.datasets import trees


@pytest.fixture(params=["torchcodec", "Pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Color JPEGs by torchcodec, where it is, and by Pillow."""
    if request.param == "torchcodec":
        if image.jpeg_decoder() is None:
            pytest.skip("needs torchcodec")
    else:
        monkeypatch.setattr(image, "jpeg_decoder", lambda: None)


@pytest.mark.parametrize("suffix", ["tif", "png", "jpg", "webp"])
def test_the_size_of_a_turned_image_is_that_of_its_pixels(suffix: str, tmp_path: Path):
    file, exif = tmp_path / f"a.{suffix}", Image.Exif()
    for turn in range(1, 9):
        exif[0x0112] = turn
        Image.new("RGB", (8, 4)).save(file, exif=exif)
        assert upright_size(file) == tuple(read_image(file).shape[:0:-1]) == ((8, 4) if turn < 5 else (4, 8))


RED, WHITE, GREY, BLACK = [255, 0, 0], [255] * 3, [100] * 3, [0] * 3


def test_what_is_no_opaque_color_photo_looks_as_viewers_show_it(tmp_path: Path):
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    moving = {"save_all": True, "append_images": [Image.new("RGB", (4, 4), "blue")]}
    for name, picture, options, color in (
        ("grey.png", Image.new("L", (4, 4), 100), {}, GREY),
        ("black.png", Image.fromarray(np.zeros((4, 4), np.uint16)), {}, BLACK),
        ("opaque.png", Image.new("RGBA", (4, 4), (255, 0, 0, 255)), {}, RED),
        ("clear.png", Image.new("RGBA", (4, 4), (255, 0, 0, 0)), {}, WHITE),
        ("palette.png", palette, {"transparency": 0}, WHITE),
        ("opaque_palette.png", palette, {}, RED),
        ("moving.gif", Image.new("RGB", (4, 4), "red"), moving, RED),
        ("cmyk.jpg", Image.new("CMYK", (4, 4), (0, 255, 255, 0)), {"quality": 100}, RED),
    ):
        picture.save(tmp_path / name, **options)
        pixels = read_image(tmp_path / name)
        assert pixels.dtype == torch.uint8 and pixels.shape == (3, 4, 4)
        assert np.abs(pixels[:, 0, 0].numpy() - np.array(color)).max() <= 3 * (name == "cmyk.jpg"), name


def write_tiff(path: Path, packed: bytes, bits: int, photometric: int = 1) -> None:
    """Write a TIFF of 4 x 2 gray values of some bits; Pillow writes neither 12 bits nor small values as white."""
    tags = {256: 4, 257: 2, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 2, 279: len(packed)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    directory = struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)
    path.write_bytes(b"II*\0" + struct.pack("<I", 8 + len(packed)) + packed + directory)


def write_deep_png(path: Path, values: np.ndarray) -> None:
    """Write (H, W, 3) values of 16 bits, which Pillow cannot."""
    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    path.write_bytes(b"\x89PNG\r\n\x1a\n")
    with path.open("ab") as file:
        for name, body in chunks:
            file.write(struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)))


GRAY = np.array([[0, 1, 17, 100], [128, 200, 254, 255]])  # as of 8 bits, what every deep image below shows
FINE = GRAY * 16 + GRAY // 16  # as of 12 bits
BITS = "".join(f"{value:012b}" for value in FINE.reshape(-1))
PACKED = bytes(int(BITS[at : at + 8], 2) for at in range(0, len(BITS), 8))
DEEP: dict[str, Callable[[Path], object]] = {  # kind and suffix
    "16 bits.png": lambda path: Image.fromarray((GRAY * 257).astype(np.uint16)).save(path),
    "smallest is white.tif": lambda path: write_tiff(path, (65535 - GRAY * 257).astype("<u2").tobytes(), 16, 0),
    "12 bits.tif": lambda path: write_tiff(path, PACKED, 12),
    "12 bits of PPM.pgm": lambda path: path.write_bytes(b"P5 4 2 4095 " + FINE.astype(">u2").tobytes()),
    "color.png": lambda path: write_deep_png(path, (GRAY * 257)[..., None].repeat(3, 2)),
    "floats.tif": lambda path: Image.fromarray((GRAY / 255).astype(np.float32)).save(path),
    "32 bits.tif": lambda path: Image.fromarray((GRAY * 257).astype(np.int32)).save(path),
    "JPEG 2000.jp2": lambda path: Image.fromarray((GRAY * 257).astype(np.uint16)).save(path, irreversible=False),
}


@pytest.mark.parametrize("kind", DEEP)
def test_more_than_8_bits_keep_their_brightness(kind: str, tmp_path: Path):
    DEEP[kind](file := tmp_path / kind)
    assert (read_image(file).numpy() == GRAY).all()
    assert (read_image(file, Box(1, 0, 3, 1)).numpy() == GRAY[:1, 1:3]).all()  # not scaled by the values of the box
    with Image.open(file) as opened:
        assert torch.equal(GivenImages([opened]).sample(0), read_image(file))
        assert opened.mode[0] in "IFR"  # unchanged


@pytest.mark.parametrize(
    ("values", "suffix", "message"),
    [
        ((GRAY * 16).astype(np.uint16), "tif", "at most 4080 of 65535, so that it would be nearly black"),
        ((GRAY * 16)[..., None].repeat(3, 2), "deep png", "at most 4095 of 65535, so that it would be nearly black"),
        (GRAY.astype(np.int32), "tif", "at most 255 of 65535"),
        (GRAY.astype(np.int32) * 10_000, "tif", r"from 0 to 2.55e\+06; expected 0, black, to 65535, white"),
        (GRAY.astype(np.int32) - 1, "tif", "from -1 to 254; expected 0, black, to 65535"),
        (GRAY.astype(np.float32), "tif", "from 0 to 255; expected 0, black, to 1, white"),
        ((GRAY / 65535).astype(np.float32), "tif", "at most 0.00389105 of 1, so that"),
        (np.where(GRAY == 1, np.nan, GRAY / 255).astype(np.float32), "tif", "from nan to nan"),
    ],
)
def test_values_of_an_unknown_range_are_refused(values: np.ndarray, suffix: str, message: str, tmp_path: Path):
    file = tmp_path / f"deep.{suffix.split()[-1]}"
    write_deep_png(file, values) if suffix == "deep png" else Image.fromarray(values).save(file)
    with pytest.raises(BadImageError, match=rf"{file}: the values of its pixels are {message}"):
        read_image(file)


def test_a_photo_with_a_second_picture_is_no_animation(tmp_path: Path):
    first, second = (Image.fromarray(gradient(*size)) for size in ((64, 48), (32, 24)))
    first.save(tmp_path / "phone.jpg", format="MPO", save_all=True, append_images=[second], quality=95)
    first.save(tmp_path / "same.jpg", quality=95)
    assert frames(tmp_path / "phone.jpg") == 1
    assert torch.equal(read_image(tmp_path / "phone.jpg"), read_image(tmp_path / "same.jpg"))
    content = (tmp_path / "phone.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(content[: content.rindex(b"\xff\xd8\xff")])  # its index lists both
    assert frames(tmp_path / "cut.jpg") == 1
    assert torch.equal(read_image(tmp_path / "cut.jpg"), read_image(tmp_path / "same.jpg"))
    reduced = read_image(tmp_path / "phone.jpg", max_pixels=1000)
    assert torch.equal(reduced, read_image(tmp_path / "same.jpg", max_pixels=1000))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.zip", b"PK\x03\x04\x14\x00", "this is a ZIP archive; unpack it"),
        ("a.jpg", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer.*git lfs pull"),
        ("a.jpg", b"\n<!DOCTYPE html><html>404</html>", "page of a website.*download it again"),
        ("a.jpg", b'\xef\xbb\xbf<?xml version="1.0"?><Error>AccessDenied</Error>', "page of a website"),
        ("a.jpg", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC image, which needs pillow-heif: pip install"),
        ("a.NEF", b"II*\0", "raw camera file; develop it to a JPEG or TIFF"),
    ],
)
def test_what_is_no_image_is_named(name: str, content: bytes, message: str, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadImageError, match=message):
        read_image(tmp_path / name)
    with pytest.raises(BadImageError, match=message), decoding(name):
        decode_image(name, content, None)


@pytest.mark.usefixtures("decoder")
def test_damaged_files_are_named(tmp_path):
    good = tmp_path / "good.jpg"
    Image.effect_noise((64, 64), 50).convert("RGB").save(good)
    for name, content in {
        "empty.jpg": b"",
        "text.jpg": b"not an image",
        "truncated.jpg": good.read_bytes()[:600],
        "truncated.png": b"\x89PNG\r\n\x1a\n\x00\x00",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadImageError, match=rf"{name}: cannot read this image"):
            read_image(tmp_path / name)
    with pytest.raises(BadImageError, match=r"none\.jpg: cannot read this image: file not found"):
        read_image(tmp_path / "none.jpg")


def test_a_folder_lists_what_the_decoder_opens():
    Image.init()
    known = {suffix for suffix, name in Image.registered_extensions().items() if name in (*FORMATS, *HEIF, "MPO")}
    assert known == EXTENSIONS


@pytest.mark.parametrize("extension", sorted(EXTENSIONS - HEIC))
def test_every_extension_has_a_decoder(extension: str, tmp_path: Path):
    Image.new("RGB", (16, 16), "red").save(tmp_path / f"red{extension}")
    assert read_image(tmp_path / f"red{extension}").shape == (3, 16, 16)


@pytest.mark.parametrize("read", [read_image, frames])
def test_postscript_named_png_starts_no_ghostscript_s1(read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pillow hands PostScript to the first gs on the PATH."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexit 1\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # looked for once a process
    (tmp_path / "x.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n")
    with pytest.raises(BadImageError, match=r"x\.png: cannot read this image: the file has no known image format"):
        read(tmp_path / "x.png")
    assert not (tmp_path / "started").exists()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_broken_later_frame_is_told(tmp_path: Path):
    frame = Image.new("L", (32, 32))
    frame.save(tmp_path / "pages.tif", save_all=True, append_images=[frame])
    content = (tmp_path / "pages.tif").read_bytes()
    (tmp_path / "pages.tif").write_bytes(content[: len(content) // 2 + 40])  # Pillow raises a TypeError
    assert read_image(tmp_path / "pages.tif").shape == (3, 32, 32)
    with pytest.raises(BadImageError, match=r"pages\.tif: cannot read this image"):
        frames(tmp_path / "pages.tif")


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize(
    ("options", "quality", "orientation"),
    [
        *product(({}, {"progressive": True}, {"keep_rgb": True}, {"subsampling": "4:2:2"}), (30, 75, 95), (6,)),
        *product(({},), (75,), (1, 2, 3, 4, 5, 7, 8)),  # pixels are turned after they are decoded
    ],
    ids=str,
)
def test_jpegs_have_pillows_pixels(tmp_path, quality: int, options: dict[str, str | bool], orientation: int):
    noise = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    photo = Image.fromarray(noise).resize((131, 97), Image.Resampling.BICUBIC)
    photo.save(tmp_path / "photo.jpg", quality=quality, exif=exif, **options)
    with Image.open(tmp_path / "photo.jpg") as opened:
        expected = np.asarray(ImageOps.exif_transpose(opened))
    assert torch.equal(read_image(tmp_path / "photo.jpg"), torch.from_numpy(expected.copy()).permute(2, 0, 1))


def test_torchcodec_decodes_whole_color_jpegs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pillow has to decode the rest: of other kinds torchcodec gives other pixels, or none."""
    marked = torch.full((3, 8, 8), 7, dtype=torch.uint8)
    monkeypatch.setattr(image, "jpeg_decoder", lambda: lambda encoded: marked if encoded[0] == 0xFF else None)
    for name, mode in {"color.jpg": "RGB", "gray.jpg": "L", "cmyk.jpg": "CMYK", "color.png": "RGB"}.items():
        Image.new(mode, (8, 8)).save(tmp_path / name)
        assert (read_image(tmp_path / name) is marked) == (name == "color.jpg")
    assert image.decode_image("x.jpg", (tmp_path / "color.jpg").read_bytes(), None) is marked
    assert read_image(tmp_path / "color.jpg", Box(0, 0, 4, 4)).shape == (3, 4, 4)
    with pytest.raises(BadImageError, match="8 x 8 pixels"):
        read_image(tmp_path / "color.jpg", Box(0, 0, 4, 4), 63)
    assert read_image(tmp_path / "color.jpg", max_pixels=63).shape == (3, 4, 4)


@pytest.mark.parametrize(
    "module", ["raise ImportError", "raise OSError('libtorch_cuda.so: no such file')", "raise RuntimeError", "", None]
)
def test_a_torchcodec_that_does_not_load_leaves_pillow(module: str | None, tmp_path: Path, monkeypatch):
    (tmp_path / "torchcodec").mkdir()
    (tmp_path / "torchcodec" / "__init__.py").touch()
    if module is not None:
        (tmp_path / "torchcodec" / "decoders.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "torchcodec"}
    try:
        assert image.jpeg_decoder.__wrapped__() is None
    finally:
        for name in ("torchcodec", "torchcodec.decoders"):
            sys.modules.pop(name, None)
        sys.modules.update(kept)


def gradient(width: int, height: int) -> np.ndarray:
    """Return smooth pixels (H, W, 3) uint8."""
    down, across = np.mgrid[0:height, 0:width]
    return np.stack([across % 200, down % 200, (across + down) % 200], axis=2).astype(np.uint8)


@pytest.mark.parametrize(("most", "scale"), [(64 * 48, 1), (64 * 48 - 1, 2), (500, 4), (48, 8)])
def test_a_jpeg_above_the_limit_is_decoded_at_the_largest_size_within_it(most: int, scale: int, tmp_path: Path):
    Image.fromarray(gradient(64, 48)).save(tmp_path / "photo.jpg", quality=100, subsampling=0)
    pixels = read_image(tmp_path / "photo.jpg", max_pixels=most).permute(1, 2, 0).numpy()
    means = gradient(64, 48).reshape(48 // scale, scale, 64 // scale, scale, 3).mean((1, 3))
    assert pixels.shape == means.shape and np.abs(pixels - means).max() <= 8


@pytest.mark.parametrize(("name", "box"), [("photo.png", None), ("photo.jpg", Box(0, 0, 4, 4)), ("photo.jpg", None)])
def test_an_image_that_stays_above_the_limit_is_refused(name: str, box: Box | None, tmp_path: Path):
    Image.fromarray(gradient(64, 48)).save(tmp_path / name)
    most = 47 if name == "photo.jpg" and box is None else 3000
    with pytest.raises(BadImageError, match=f"64 x 48 pixels; expected at most {most:,}; .* raise dataset.max_pixels"):
        read_image(tmp_path / name, box, most)


def test_a_very_long_image_is_refused(tmp_path: Path):
    Image.new("L", (1, MAX_SIDE + 1)).save(tmp_path / "long.png")
    Image.new("L", (1, MAX_SIDE)).save(tmp_path / "longest.png")
    for read in (read_image, decoded_pixels):
        with pytest.raises(BadImageError, match="1 x 65536 pixels; expected at most 65,535 on a side"):
            read(tmp_path / "long.png")
    assert read_image(tmp_path / "longest.png").shape == (3, MAX_SIDE, 1)


@pytest.mark.parametrize("most", [MAX_PIXELS, 1500])
def test_the_pixels_of_an_image_are_known_from_its_header(most: int, tmp_path: Path):
    for name in ("photo.jpg", "photo.webp", "photo.png"):
        Image.effect_noise((64, 48), 50).convert("RGB").save(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        if name != "photo.jpg" and most == 1500:
            with pytest.raises(BadImageError, match="expected at most 1,500"):
                decoded_pixels(name, content, most)
            continue
        whole = decode_image(name, content, None, most)
        assert decoded_pixels(tmp_path / name, max_pixels=most) == decoded_pixels(name, content, most)
        assert decoded_pixels(name, content, most) == whole.shape[1] * whole.shape[2]
        if name != "photo.webp":  # whose header Pillow reads together with the rest
            assert decoded_pixels(name, content[:-100], most) == whole.shape[1] * whole.shape[2]


@pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
def test_pillows_own_limit_neither_shows_nor_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # an error above 200, a warning above 100
    for name in ("photo.jpg", "photo.webp", "photo.png", "photo.tif"):
        Image.fromarray(gradient(64, 48)).save(tmp_path / name)
        assert read_image(tmp_path / name).shape == (3, 48, 64)
        assert read_image(tmp_path / name, Box(0, 0, 40, 40)).shape == (3, 40, 40)
        assert Image.MAX_IMAGE_PIXELS == 100


def test_the_limit_of_a_recipe_reaches_every_image(tmp_path: Path):
    trees.photos(tmp_path, (f"{label}/{number}.jpg" for label in "abcdef" for number in (1, 2)), side=(64, 48))
    config = FolderConfig(root=str(tmp_path), max_pixels=1000)
    for split in ("train", "validation", "test", "all"):  # the first two are parts of a list
        assert config.build(split).sample(0).shape == (3, 24, 32)
    recipe = parse_recipe(TINY_RECIPE, "tiny.yaml", [f"dataset={{name: folder, root: '{tmp_path}', max_pixels: 1000}}"])
    assert dataset_of(None, "train", recipe).sample(0).shape == (3, 24, 32)


def test_a_box_is_drawn_at_its_place_in_a_reduced_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Image.new("RGB", (640, 320), "blue").save(tmp_path / "a.jpg", quality=95)
    lines: list[np.ndarray] = []
    for most in (640 * 320, 60_000):
        monkeypatch.setattr("dmlkit.identify.page.read_image", partial(read_image, max_pixels=most))
        picture = Image.open(BytesIO(drawn_picture(str(tmp_path / "a.jpg"), Box(160, 80, 400, 240))))
        lines.append(np.asarray(picture)[..., 0] > 150)  # yellow
    corners = [(*line.any(0).nonzero()[0][[0, -1]], *line.any(1).nonzero()[0][[0, -1]]) for line in lines]
    assert np.abs(np.subtract(*corners)).max() <= 2


def test_large_images_take_turns():
    """As many as fit into the bound are decoded at once; one larger than it is decoded alone; small ones never wait."""
    turns, lock, now, most = Turns(most=100, unit=10), Lock(), list[int](), list[int]()

    def decode(pixels: int) -> None:
        with turns.for_pixels(pixels):
            with lock:
                now.append(pixels)
                most.append(sum(now))
            sleep(0.001)  # so that others start meanwhile
            with lock:
                now.remove(pixels)

    sizes = np.random.default_rng(0).choice([10, 30, 40, 70, 100], 60).tolist()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(decode, [*sizes, 1000, *sizes]))
    assert len(most) == 121 and max(size for size in most if size < 1000) <= 100
    assert [size for size in most if size >= 1000] == [1000]
    with turns.for_pixels(1000), turns.for_pixels(9), turns.for_pixels(9):
        pass


class Marks(Dataset):
    """Numbers of readers that share a bound."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(4, dtype=torch.int64), [""], [""] * 4)

    def sample(self, index: int) -> Tensor:
        return torch.tensor([len(image._turns)], dtype=torch.float32)


@pytest.mark.usefixtures("images_have_readers")
def test_readers_share_a_bound_and_this_process_has_none():
    loader = evaluation_loader(Marks(), None, batch_size=2, workers=2)
    assert torch.cat([batch.inputs for batch in loader]).tolist() == [[1]] * 4
    assert image._turns == []
