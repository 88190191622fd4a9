"""`dmlkit.load` and what it is given: embeddings of the right shape, or a user's error, whatever is handed to it."""

from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import dmlkit
from dmlkit.errors import UserError
from tests.fuzz.conftest import RECIPE, Workplace, examples

MODES = (
    *("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "RGBX", "RGBa", "La"),
    "I;16",
)
DTYPES = ("uint8", "int8", "uint16", "int64", "float16", "float32", "float64", "bool", "complex64", "U3", "O", "M8[s]")
DATA = "{name: vectors, embeddings: vectors.npy, labels: labels.npy}"
VECTORS = RECIPE.replace("{name: glyphs, classes: 12, images_per_class: 3, size: 16}", DATA)
VECTORS = VECTORS.replace("{name: plain, size: 16}", "null").replace("{name: small_cnn, width: 4}", "{name: identity}")


@st.composite
def pictures(draw: Callable[..., Any]) -> Any:
    """An image of Pillow's: of any mode and many sizes, animated, closed, or cut off."""
    image = Image.new(draw(st.sampled_from(MODES)), (draw(st.integers(0, 9)), draw(st.integers(0, 9))))
    if image.mode == "P" and draw(st.booleans()):
        image.info["transparency"] = draw(st.sampled_from([0, 255, b"\x00\x80"]))
    if draw(st.integers(0, 9)) == 0:
        image.close()
    return image


@st.composite
def arrays(draw: Callable[..., Any]) -> Any:
    """An array of any kind: many are images or vectors."""
    dtype = draw(st.sampled_from(("uint8", "float32", *DTYPES)))
    shape = draw(
        st.lists(st.integers(0, 7), max_size=5)
        | st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(0, 7), st.just(3))
        | st.tuples(st.integers(0, 7), st.integers(0, 7), st.just(3))
        | st.tuples(st.integers(0, 4), st.just(7))
    )
    array = np.zeros(tuple(shape), dtype=dtype)
    if array.size and array.dtype.kind == "f":
        array.flat[0] = draw(st.sampled_from([0.0, 1.0, np.nan, np.inf, 6e4]))
    return draw(st.sampled_from([array, np.asfortranarray(array), array[::-1] if array.ndim else array]))


paths = st.sampled_from(
    ("photos/ant/0.png", "photos/ant", "nowhere.png", "", "\0", "a" * 300, "x.npy", "cut.png", "empty.png", "\ud800")
)
members = pictures() | arrays() | paths | paths.map(Path) | st.sampled_from([None, 3, b"x", [], {}, object()])
handed_over = (
    st.lists(members, max_size=4)
    | st.lists(members, max_size=4).map(tuple)
    | st.lists(st.just("photos/bee/0.png") | pictures(), max_size=4)
    | arrays()
    | members
)


class Given(NamedTuple):
    """What the tests share: a folder, and models of runs in it."""

    place: Workplace
    models: dict[str, dmlkit.Embedder]


@pytest.fixture(scope="module")
def given_models(ground: Path, tmp_path_factory: pytest.TempPathFactory, command: Callable[..., Any]) -> Given:
    """The ground with images that are none, and models: of its run, and of a run over vectors."""
    place = Workplace(ground, tmp_path_factory.mktemp("embedder") / "place")
    folder = place.folder
    data = (folder / "photos" / "ant" / "0.png").read_bytes()
    (folder / "cut.png").write_bytes(data[: len(data) // 2])
    (folder / "empty.png").touch()
    np.save(folder / "vectors.npy", np.random.default_rng(0).normal(size=(24, 7)).astype(np.float32))
    np.save(folder / "labels.npy", np.arange(24) % 12)
    (folder / "vectors.yaml").write_text(VECTORS)
    with chdir(folder):
        code, said = command("train", "vectors.yaml", "-o", "over vectors")
        assert code == 0, said
    runs = {"images": folder / "run", "vectors": folder / "over vectors"}
    return Given(place, {name: dmlkit.load(run, device="cpu") for name, run in runs.items()})


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["images", "vectors"])
@examples(60, 1_500)
@given(images=handed_over)
def test_whatever_is_embedded_has_one_row_each_or_is_refused(kind: str, images: Any, given_models: Given):
    with chdir(given_models.place.folder):
        try:
            points = given_models.models[kind].embed(images)
        except UserError as error:
            assert str(error)
            return
    assert points.shape == (len(images), 6) and points.dtype == np.float32 and np.isfinite(points).all()


@pytest.mark.heavy
@examples(60, 1_000)
@given(a=arrays() | members, b=arrays() | members)
def test_similarity_is_of_embeddings_or_refused(a: Any, b: Any, given_models: Given):
    model = given_models.models["images"]
    try:
        similarity = model.similarity(a, b)
    except UserError as error:
        assert str(error)
        return
    assert similarity.shape == (len(a), len(b)) and similarity.dtype == np.float32


@pytest.mark.parametrize(
    "run", ["", ".", "\0", "nowhere", "a" * 300, "photos", "x.npy", "run/checkpoints", "base.yaml"]
)
def test_what_is_no_run_is_not_loaded(run: str, tmp_path: Path):
    for name in ("photos", "run/checkpoints"):
        (tmp_path / name).mkdir(parents=True)
    for name, text in (("x.npy", ""), ("base.yaml", RECIPE), ("run/checkpoints/best.pt", "")):
        (tmp_path / name).write_text(text)
    with chdir(tmp_path), pytest.raises((UserError, OSError)):
        dmlkit.load(run, device="cpu")
