"""Several augmented views of each image, and cached features in place of them."""

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.paths import PickedPaths
from dmlkit.datasets.files.vectors import VectorFile
from dmlkit.loading.inputs import Draw, Inputs, Item, TransformedImages
from dmlkit.transforms.base import TransformConfig


class Views(Dataset):
    """Each image of a dataset several times.

    Args:
        dataset: the images.
        views: how many times.
    """

    def __init__(self, dataset: Dataset, views: int) -> None:
        images = np.arange(len(dataset)).repeat(views)
        super().__init__(
            dataset.labels.repeat_interleave(views), dataset.class_names, PickedPaths(dataset.paths, images)
        )
        self.dataset, self.views = dataset, views
        self.in_memory, self.resizing = dataset.in_memory, dataset.resizing

    def key(self, index: int) -> str:
        return f"{self.dataset.key(index // self.views)} view {index % self.views}"

    def sample(self, index: int) -> Tensor:
        return self.dataset.sample(index // self.views)


class AugmentedViews(Inputs):
    """Views, each augmented in its own way: by its number, so that they are the same whoever computes them.

    Args:
        views: of a dataset's images.
        transform: the one for training is applied.
    """

    def __init__(self, views: Views, transform: TransformConfig) -> None:
        super().__init__(views)
        self.images = TransformedImages(views, transform, training=True)

    def __getitem__(self, draw: Draw) -> Item:
        index, _ = draw
        return self.images[index, int(np.random.default_rng(index).integers(2**62))]


class CachedFeatures(Dataset):
    """Features in place of a dataset's images.

    Args:
        dataset: the images.
        vectors: V features of each image in turn, (N V, F).
    """

    in_memory = True

    def __init__(self, dataset: Dataset, vectors: VectorFile) -> None:
        super().__init__(
            dataset.labels,
            dataset.class_names,
            dataset.paths,
            query=dataset.query,
            gallery=dataset.gallery,
            super_classes=dataset.super_classes,
            groups=dataset.groups,
        )
        self.dataset, self.vectors = dataset, vectors
        self.views = len(vectors) // len(dataset)
        self.num_features = vectors.num_features

    def key(self, index: int) -> str:
        return self.dataset.key(index)

    def sample(self, index: int) -> Tensor:
        return self.view(index, 0)

    def view(self, index: int, view: int) -> Tensor:
        """Features (F,) of one view of image ``index``."""
        return torch.from_numpy(self.vectors.row(index * self.views + view))


class DrawnViews(Inputs):
    """Cached features to train on: of each image the view that the draw's seed decides."""

    def __init__(self, dataset: CachedFeatures) -> None:
        super().__init__(dataset)
        self.features = dataset

    def __getitem__(self, draw: Draw) -> Item:
        index, seed = draw
        return Item(self.features.view(index, seed % self.features.views), int(self.features.labels[index]), index)
