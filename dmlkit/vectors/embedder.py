"""Model of a run, or a pretrained one, in a Python program: images or vectors in, NumPy arrays out."""

import os
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from torch import Tensor

from dmlkit.backbones.base import BackboneConfig
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.samples import Samples
from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt
from dmlkit.files.image_file import Box, decoding, to_rgb
from dmlkit.files.paths import raise_faults
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.run_folder.pretrained import pretrained_recipe
from dmlkit.vectors.hub import SCHEME, download, is_hub_folder, load_hub
from dmlkit.vectors.images import ImageList
from dmlkit.vectors.in_memory import embed_images
from dmlkit.vectors.progress_bar import image_progress, no_bar
from dmlkit.vectors.store import BATCH_IMAGES
from dmlkit.vectors.trained import TrainedModel, computed_by, load_model, pretrained_model

Picture = str | Path | Image.Image | NDArray[np.uint8]
"""Image: the path of a file, a Pillow image, or an RGB array (H, W, 3) uint8."""
BACKBONE_NAME = re.compile(r"(\w{2,})(?::(.+))?")  # of two letters or more: C: is a drive


class Embedder:
    """Model of a run, or a pretrained one, made by `dmlkit.load`."""

    def __init__(self, trained: TrainedModel, ranks: Ranks, again: "Callable[[], Embedder] | None" = None) -> None:
        self.trained, self._ranks, self._again = trained, ranks, again

    def __reduce__(self) -> Any:
        """Return how a process that gets a copy, e.g. of a pool, loads the model again: no weights are sent."""
        return self._again, ()

    def __copy__(self) -> "Embedder":
        return Embedder(self.trained, self._ranks, self._again)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Embedder":
        """Return a copy of the model as it is now, which may differ from its files."""
        return Embedder(deepcopy(self.trained, memo), self._ranks, self._again)

    def embed(self, images: Sequence[Picture] | NDArray[Any]) -> NDArray[np.float32]:
        """Return the embeddings (N, D) of N images, or of vectors (N, F) if the run takes vectors.

        More than 128 images show a progress bar in a terminal.

        Args:
            images: paths, Pillow images and arrays (H, W, 3) uint8, also mixed; or one array (N, H, W, 3).

        Raises:
            UserError: images cannot be read; the message has a line for each.
        """
        if isinstance(images, str | Path | Image.Image):
            raise UserError(f"embed: got one {type(images).__name__}, expected a list of images: embed([image])")
        unchecked: Any = images
        if not (unchecked.ndim if isinstance(unchecked, np.ndarray) else isinstance(unchecked, Sequence)):
            raise UserError(f"embed: got {type(images).__name__}, expected a list of images or an array")
        samples = self.trained.samples
        dataset = GivenImages(images) if samples.has_pixels else GivenArrays(images, samples)
        if not len(dataset):
            return np.empty((0, self.trained.manifold.point_dim), dtype=np.float32)
        bar = no_bar if len(dataset) <= BATCH_IMAGES else partial(image_progress, Console(stderr=True))
        embeddings = embed_images(self.trained, self._ranks, dataset, "embed", bar)
        raise_faults(embeddings.faults)
        return embeddings.points.numpy()

    @torch.inference_mode()
    def similarity(self, a: NDArray[np.floating], b: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return the similarity (N, M) of embeddings a (N, D) and b (M, D); larger is more similar.

        Raises:
            UserError: a or b are not embeddings of this model.
        """
        manifold, width = self.trained.manifold, self.trained.manifold.point_dim
        arguments: dict[str, Any] = {"a": a, "b": b}
        for name, points in arguments.items():
            if not isinstance(points, np.ndarray) or points.shape[1:] != (width,) or points.dtype.kind != "f":
                expected = f"{name} of shape (N, {width}) and floats"
                raise UserError(f"similarity: expected {expected}, got {_described(points)}")
        x, y = (torch.from_numpy(points.astype(np.float32)).to(self._ranks.device) for points in (a, b))
        return manifold.exact_similarity(x, y).cpu().numpy()


def load(run: str | Path, *, checkpoint: CheckpointName | None = None, device: str = "auto") -> Embedder:
    """Load the model of a run, a folder of ``dmlkit export --format hub``, or a pretrained model without training.

    Such a folder may be on the Hugging Face Hub: ``hf://OWNER/NAME``, or ``hf://OWNER/NAME@REVISION`` with a branch, a
    tag or a commit. It is downloaded once, by huggingface_hub.

    A pretrained model is named as a backbone of recipes: ``timm:MODEL`` for any model of timm (also of the Hugging Face
    Hub, ``timm:hf-hub:OWNER/REPOSITORY``, or in a folder, ``timm:local-dir:FOLDER``), or a network of torchvision:
    ``resnet50``, ``convnext:small``, ``vit:b_16``.
    Its embeddings are the pooled features as unit vectors, as those of a run's checkpoint ``pretrained``.

    Args:
        run: folder of the run or of the export, its address on the Hub, or name of a pretrained model; an existing
            folder with this name takes precedence.
        checkpoint: checkpoint of a run. Default: best, otherwise last.

    Raises:
        UserError: there is no run or no readable checkpoint of it, or no such model, or its weights cannot be
            downloaded.

    Example:
        >>> model = load("timm:tf_efficientnet_lite0", device="cpu")  # its weights come with dmlkit[lite]
        >>> embeddings = model.embed(np.zeros((2, 32, 32, 3), np.uint8))
        >>> embeddings.shape, round(float(model.similarity(embeddings, embeddings)[0, 1]), 4)
        ((2, 1280), 1.0)
    """
    is_address = isinstance(run, str) and run.startswith(SCHEME)
    name = BACKBONE_NAME.fullmatch(run) if isinstance(run, str) and not is_address else None
    is_name = name is not None and bool(name[2] or name[1] in BackboneConfig.variants) and not Path(run).exists()
    is_hub = is_address or (not is_name and is_hub_folder(Path(run)))
    if checkpoint is not None and (is_name or is_hub):
        kind = "a pretrained model" if is_name else "an exported model"
        raise UserError(f"{run}: this is {kind}; checkpoint={checkpoint!r} applies only to runs; remove it")
    ranks = start_ranks(device)
    if is_name:
        trained = computed_by(pretrained_model(pretrained_recipe(str(run)), None, ranks), ranks)
    elif is_hub:
        trained = load_hub(download(str(run)) if is_address else Path(run), ranks)
    else:
        trained = load_model(RunFolder(Path(run)), ranks, checkpoint)
    place = run if is_name or is_address else Path(run).absolute()  # the process may change its folder
    return Embedder(trained, ranks, partial(load, place, checkpoint=checkpoint, device=device))


class GivenImages(ImageList):
    """Unlabeled images: files, and images in memory."""

    def __init__(self, images: Sequence[Picture] | NDArray[Any], boxes: Sequence[Box | None] = ()) -> None:
        self.images = images
        self.in_memory = not any(isinstance(image, str | Path) for image in images)
        raise_faults(fault for row, image in enumerate(images) if (fault := _fault(row, image)))
        names = [str(image) if isinstance(image, str | Path) else f"images[{row}]" for row, image in enumerate(images)]
        super().__init__(names, boxes=boxes)

    def file(self, index: int) -> str | None:
        return super().file(index) if isinstance(self.images[index], str | Path) else None

    def sample(self, index: int) -> Tensor:
        image = self.images[index]
        if isinstance(image, str | Path):
            return super().sample(index)
        if isinstance(image, np.ndarray):
            return torch.from_numpy(image.copy()).permute(2, 0, 1)
        with decoding(self.paths[index]):  # it may be opened and not read yet, closed, or of a mode that is not shown
            return torch.from_numpy(to_rgb(self.paths[index], image, in_place=False)).permute(2, 0, 1)


def _fault(row: int, image: object) -> str | None:
    """Return what is wrong with an image, as far as can be known without decoding a file."""
    if isinstance(image, str | Path):
        is_file = os.path.isfile(image)  # noqa: PTH113 - of a name longer than a file system takes Path raises an error
        return None if is_file else f"{excerpt(str(image))}: no such image file"
    if isinstance(image, np.ndarray):
        is_image = image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3 and image.size
        return None if is_image else f"images[{row}]: expected (H, W, 3) uint8 RGB, got {image.shape} {image.dtype}"
    if isinstance(image, Image.Image):
        return None if image.width * image.height else f"images[{row}]: is {image.width} x {image.height} pixels"
    return f"images[{row}]: expected a path, an image of Pillow's or an array, got {type(image).__name__}"


class GivenArrays(Dataset):
    """Unlabeled vectors, or other samples that are not images, in memory."""

    in_memory = True

    def __init__(self, arrays: object, samples: Samples) -> None:
        blank = samples.blank(0)[0]
        shape = ", ".join(map(str, ("N", *blank.shape)))
        if not isinstance(arrays, np.ndarray) or arrays.shape[1:] != blank.shape or arrays.dtype.kind not in "fiu":
            got = _described(arrays)
            raise UserError(f"embed: this run takes {samples.name}s; expected an array ({shape}), got {got}")
        values: NDArray[Any] = arrays
        names = [f"{samples.name}s[{row}]" for row in range(len(values))]
        is_finite = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
        raise_faults(f"{names[row]}: has nan or inf" for row in np.flatnonzero(~is_finite))
        super().__init__(torch.zeros(len(names), dtype=torch.int64), ("",), names)
        self.kind, self.arrays = samples, torch.from_numpy(values.astype(np.float32)).to(blank.dtype)

    def sample(self, index: int) -> Tensor:
        return self.arrays[index]


def _described(value: object) -> str:
    """Describe what was given instead of a suitable array."""
    return f"an array {value.shape} of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
