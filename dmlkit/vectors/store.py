"""Points of images, computed once: the parts of a folder, which any number of processes fill.

    RUN/vectors/KEY/model.json                       what the points depend on besides their images
    RUN/vectors/KEY/NAME-CHECKSUM.safetensors        a part: keys (n, 24), points (n, D), perhaps local (n, P, C)

An image that changes gets another id, and another model another key: no point is ever out of date. A part gets its
name, which holds its checksum, when it is complete, so it does not matter who computes it, how often, or which process
dies. The folder of a run may be removed at any time: its points are computed again.
"""

import hashlib
import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dmlkit import __version__
from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.errors import UserError, warn
from dmlkit.files.arrays import Values
from dmlkit.files.atomic import atomic_write
from dmlkit.files.regular import check_regular, file_checksum
from dmlkit.loading.image_changes import stamp
from dmlkit.recipe.plugin import plugins_of
from dmlkit.vectors.manifest import StoredModel
from dmlkit.vectors.trained import TrainedModel, describe

BATCH_IMAGES = 128  # for so few the start of loader processes takes longer than the images
PART_IMAGES = 64 * BATCH_IMAGES  # at most: 17 MB at 512 dimensions, and what a kill can cost
PARTS = 64  # at least, where there are batches for so many: short lists keep 8 GPUs evenly busy too
ID, KEY = 16, 24  # bytes: of the id of an image, and with the hash of the batch that its point was computed in
SUFFIX = ".safetensors"
DTYPES = {"points": torch.float32, "local": torch.float16}
PACKAGES = ("torchvision", "pillow", "torchcodec", "onnxruntime")
HASH = 16  # hexadecimal digits of the hash of the code of a plug-in


def stored_model(trained: TrainedModel, device: str = "") -> StoredModel:
    """Return what the points of a model depend on; by default on its own device."""
    description = describe(trained).plain()
    for name in ("checkpoint", "epoch"):  # the same weights may have two names, and come from any training
        del description["model"][name]
    description["model"]["backbone"].pop("tuning", None)
    del description["computation"]  # figures of its agreement; the device names it
    software = {"dmlkit": __version__, "torch": torch.__version__}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            software[package] = version(package)
    if trained.local:
        description["local"] = trained.local.model_dump(mode="json")
    return StoredModel(
        saved=trained.saved,
        fingerprint=trained.fingerprint,
        description=description,
        software=software | {record.name: record.sha256[:HASH] for record in plugins_of(trained.recipe)},
        device=device or trained.place,
    )


def image_keys(dataset: Dataset, config: DatasetConfig | None = None) -> Values:
    """Return the keys (N, 24) uint8 of samples: 16 bytes of an id, and 8 of the batch in which the list computes it.

    A file counts by its path, size and modification time, a box and a sample of another kind by its name too, and a
    sample in memory by its content.

    Args:
        config: options of the dataset. Default: only whole files have a key; others have zeros, which no store has.
    """
    options = b"" if config is None else config.model_dump_json(exclude={"on_bad_image", "where"}).encode()
    real_path = cache(os.path.realpath)

    def content(index: int) -> bytes | None:
        if file := dataset.file(index):
            folder, name = os.path.split(file)
            return f"{real_path(folder)}\0{name}\0{stamp(file)}".encode(errors="surrogateescape")
        if config is None:
            return None
        if dataset.in_memory:
            sample = dataset.sample(index)
            return f"{sample.dtype}{[*sample.shape]}".encode() + np.ascontiguousarray(sample.numpy()).tobytes()
        return options + f"\0{dataset.key(index)}\0{stamp(dataset.paths[index])}".encode(errors="surrogateescape")

    contents = map(content, range(len(dataset)))
    return keys_of([bytes(ID) if data is None else hashlib.sha256(data).digest()[:ID] for data in contents])


def hash_images(dataset: Dataset, config: DatasetConfig) -> str:
    """Return a hash that changes with the images of a dataset, their order or their labels."""
    digest = hashlib.sha256(image_keys(dataset, config).tobytes())
    digest.update("\0".join(map(str, dataset.label_names(dataset.labels))).encode())
    return digest.hexdigest()


def keys_of(ids: Sequence[bytes]) -> Values:
    """Return the keys (N, 24) uint8 of a list of ids of 16 bytes each.

    Example:
        >>> keys_of([bytes(16), bytes(range(16))]).shape
        (2, 24)
    """
    keys = np.zeros((len(ids), KEY), np.uint8)
    keys[:, :ID] = np.frombuffer(b"".join(ids), np.uint8).reshape(-1, ID)
    for start in range(0, len(keys), BATCH_IMAGES):
        batch = keys[start : start + BATCH_IMAGES]
        batch[:, ID:] = np.frombuffer(hashlib.sha256(batch[:, :ID].tobytes()).digest()[: KEY - ID], np.uint8)
    return keys


class VectorStore:
    """Points of images by their keys, see `image_keys`. It has the parts that were there when it was opened.

    Args:
        local: shape (P, C) of the local features of an image; None if there are none.
        keeps_damaged: leave a damaged part, which something names; by default it is removed with a warning, since its
            points can be computed again.

    Attributes:
        parts: keys (n, 24) of each part by the name of its file.
        faults: why images could not be read, by their ids in hexadecimal digits.

    Example:
        >>> import tempfile
        >>> folder, keys = Path(tempfile.mkdtemp()), keys_of([bytes([number] * 16) for number in range(3)])
        >>> _ = write_part(folder, keys[1:], torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> store = VectorStore(folder, 2)
        >>> store.find(keys).tolist(), store.points_at(store.find(keys)[1:]).tolist()
        ([-1, 0, 1], [[1.0, 0.0], [0.0, 1.0]])
    """

    def __init__(
        self,
        path: Path,
        dim: int,
        local: tuple[int, int] | None = None,
        *,
        used: Container[str] = (),
        keeps_damaged: bool = False,
    ) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {"points": (dim,)} | ({"local": local} if local else {})
        self.faults, self.parts = dict[str, str](), dict[str, Values]()
        self._mapped: dict[str, Tensor] = {}  # points of parts by the names of their files
        self._used, self._keeps_damaged = used, keeps_damaged
        self.open_new()

    @classmethod
    def at(cls, path: Path, trained: TrainedModel, **options: Any) -> "VectorStore":
        """Open the points of a model in a folder, which its `stored_model` names."""
        return cls(path, trained.manifold.point_dim, trained.local.shape if trained.local else None, **options)

    def open_new(self) -> None:
        """Open the parts that other processes have written since; the rows of the others stay as they are."""
        for file in sorted(self.path.glob(f"*{SUFFIX}")):
            if file.name not in self.parts and file.name not in self._used:
                try:
                    tensors, faults = open_part(file, self.shapes)
                except UserError as error:
                    if not self._keeps_damaged:
                        warn(f"{error}; its images are embedded again")
                        with suppress(OSError):
                            file.unlink()
                    continue
                self.parts[file.name] = tensors["keys"].numpy().copy()
                self.faults.update(faults)
        self._starts: Values = np.cumsum([0, *map(len, self.parts.values())])  # first row of each part, and the end
        self._keys: Values = np.concatenate([np.empty((0, KEY), np.uint8), *self.parts.values()])

    def find(self, keys: Values, *, exact: bool = False) -> Values:
        """Return the row (N,) of each image; -1 where its point is missing.

        Args:
            exact: take only points that were computed in the batches of this list, which are equal to the bit to those
                computed now; those of other batches differ by rounding, a few times 6e-8 of unit vectors. Otherwise
                they come first.
        """
        rows = _find(keys, self._keys)
        if not exact and (missing := rows < 0).any():
            rows[missing] = _find(keys[missing, :ID], self._keys[:, :ID])
        return rows

    def places(self, rows: Values) -> tuple[Values, Values]:
        """Return the number of the part of each row (M,), and the row in it."""
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        return numbers, rows - self._starts[numbers]

    def points_at(self, rows: Values) -> Tensor:
        """Return the points (M, D) float32 of rows (M,)."""
        (numbers, places), names = self.places(rows), [*self.parts]

        def tensor_of(number: int) -> Tensor:
            if (name := names[number]) not in self._mapped:
                self._mapped[name] = tensors_of(self.path / name)[0]["points"]
            return self._mapped[name]

        return gathered(numbers, places, tensor_of, self.shapes["points"], DTYPES["points"])

    def release(self) -> None:
        """Release the pages that were read, so that they do not count as memory of the process."""
        self._mapped.clear()


def names_of(keys: Values) -> list[str]:
    """Return the ids of keys in hexadecimal digits."""
    return [key.tobytes().hex() for key in keys[:, :ID]]


def write_part(
    path: Path, keys: Values, points: Tensor, local: Tensor | None = None, faults: Mapping[str, str] | None = None
) -> str:
    """Write a part of a store, all or nothing, and return the name of its file.

    Args:
        local: (n, P, C) float16, their local features, if the store has them.
        faults: messages on images that could not be read, by their ids in hexadecimal digits.
    """
    tensors = {"keys": torch.from_numpy(np.ascontiguousarray(keys)), "points": points.contiguous()}
    tensors |= {} if local is None else {"local": local.contiguous()}
    content = save(tensors, {"faults": json.dumps(faults or {}, sort_keys=True)})
    name = f"{hashlib.sha256(keys.tobytes()).hexdigest()[:12]}-{crc32(content):08x}{SUFFIX}"
    path.mkdir(parents=True, exist_ok=True)
    with atomic_write(path / name) as partial:
        partial.write_bytes(content)
    return name


def open_part(
    file: Path, shapes: Mapping[str, tuple[int, ...]], *, is_read: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Map a part into memory, and return its tensors and faults.

    Args:
        shapes: shapes of the points, and of the local features, of an image.
        is_read: compare it with the checksum in its name, not only with its size.
    """
    try:
        check_regular(file)
        if is_read and f"{file_checksum(file):08x}" != file.stem.rpartition("-")[2]:
            raise ValueError("is not what was written: its checksum differs from its name")
        tensors, faults = tensors_of(file)
        if {name: (len(tensors["keys"]), *shape) for name, shape in {"keys": (KEY,), **shapes}.items()} != {
            name: tuple(tensor.shape) for name, tensor in tensors.items()
        }:
            raise ValueError("has points of another model")
    except FileNotFoundError:
        raise UserError(f"{file}: is missing") from None
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file}: {error}") from error
    return tensors, faults


def gathered(
    numbers: Values, places: Values, tensor_of: Callable[[int], Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return rows (M, ...) of parts, given the number of the part of each and the place in it."""
    values = torch.empty(len(places), *shape, dtype=dtype)
    for number in np.unique(numbers):
        in_part = numbers == number
        values[torch.from_numpy(in_part)] = tensor_of(number)[torch.from_numpy(places[in_part])]
    return values


def tensors_of(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Map the tensors of a part into memory, without any check; return them and its faults."""
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        return tensors, json.loads(opened.metadata()["faults"])


def _find(keys: Values, among: Values) -> Values:
    """Return the first place (N,) of each key among others; -1 where there is none."""
    wanted, known = (np.ascontiguousarray(rows).view(f"S{rows.shape[1]}")[:, 0] for rows in (keys, among))
    if not len(known):
        return np.full(len(wanted), -1)
    order = known.argsort(kind="stable")
    indices = order[np.searchsorted(known, wanted, sorter=order).clip(max=len(known) - 1)]
    return np.where(known[indices] == wanted, indices, -1)
