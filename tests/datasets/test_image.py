"""Decoding: every kind of image becomes upright 8-bit RGB with the colours that it shows."""

import os
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from dmlkit.datasets.files import image
from dmlkit.datasets.files.image import frames, read_image
from dmlkit.files.image_file import BadImageError, Box
from dmlkit.files.regular import EXTENSIONS


@pytest.fixture(params=["torchcodec", "Pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Color JPEGs by torchcodec, where it is, and by Pillow."""
    if request.param == "torchcodec":
        if image.jpeg_decoder() is None:
            pytest.skip("needs torchcodec")
    else:
        monkeypatch.setattr(image, "jpeg_decoder", lambda: None)


RED, WHITE = [255, 0, 0], [255, 255, 255]


def pixel(path: Path, row: int = 0, column: int = 0) -> list[int]:
    pixels = read_image(path)
    assert pixels.dtype == torch.uint8 and pixels.shape[0] == 3
    return pixels[:, row, column].tolist()


def test_grey_and_16_bit_keep_their_brightness(tmp_path):
    Image.fromarray(np.full((4, 4), 100, np.uint8)).save(tmp_path / "grey.png")
    assert pixel(tmp_path / "grey.png") == [100, 100, 100]
    Image.fromarray(np.full((4, 4), 100 * 257, np.uint16)).save(tmp_path / "deep.png")
    assert pixel(tmp_path / "deep.png") == [100, 100, 100]


def test_transparency_lies_on_white(tmp_path):
    Image.new("RGBA", (4, 4), (255, 0, 0, 255)).save(tmp_path / "opaque.png")
    assert pixel(tmp_path / "opaque.png") == RED
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert pixel(tmp_path / "clear.png") == WHITE
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.save(tmp_path / "palette.png", transparency=0)
    assert pixel(tmp_path / "palette.png") == WHITE
    palette.save(tmp_path / "opaque_palette.png")
    assert pixel(tmp_path / "opaque_palette.png") == RED


def test_cmyk(tmp_path):
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg", quality=100)
    assert np.abs(np.array(pixel(tmp_path / "cmyk.jpg")) - RED).max() <= 3


@pytest.mark.usefixtures("decoder")
def test_exif_rotation_is_applied(tmp_path):
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, :16] = RED  # the left half is red
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn by 90 degrees clockwise to view
    Image.fromarray(pixels).save(tmp_path / "turned.jpg", exif=exif, quality=100)
    upright = read_image(tmp_path / "turned.jpg")
    assert upright.shape == (3, 32, 16)
    assert upright[0, 2].float().mean() > 200 > 50 > upright[0, -2].float().mean()  # red is on top now


def test_the_first_frame_of_an_animation(tmp_path):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    assert pixel(tmp_path / "moving.gif") == RED


@pytest.mark.usefixtures("decoder")
def test_damaged_files_are_named(tmp_path, monkeypatch):
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
    monkeypatch.setattr("dmlkit.files.image_file.MAX_PIXELS", 4000)
    with pytest.raises(BadImageError, match="64 x 64 pixels; expected at most 4,000"):
        read_image(good)


@pytest.mark.parametrize("extension", sorted(EXTENSIONS))
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
    with pytest.raises(
        BadImageError, match=r"x\.png: cannot read this image: the file has no known image format \(JPEG, "
    ):
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
    monkeypatch.setattr("dmlkit.files.image_file.MAX_PIXELS", 63)
    with pytest.raises(BadImageError, match="8 x 8 pixels"):
        read_image(tmp_path / "color.jpg")


@pytest.mark.parametrize(
    "module",
    ["raise ImportError", "raise OSError('libtorch_cuda.so: no such file')", "raise RuntimeError", "", None],
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
