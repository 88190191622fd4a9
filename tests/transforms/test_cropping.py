"""Random crops and torchvision's, with the same random numbers."""

from collections.abc import Callable

import pytest
import torch
from torchvision.transforms import v2

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.transforms.cropping import RandomResizedCrop, SquareCrop


class Pictures(Dataset):
    """Noise of several shapes."""

    shapes = ((120, 90), (300, 340), (256, 384), (600, 1500))

    def __init__(self) -> None:
        super().__init__(torch.tensor([0, 1, 0, 1]), ["one", "two"], [f"{number}.png" for number in range(4)])

    def sample(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (3, *self.shapes[index]), dtype=torch.uint8, generator=generator)


BICUBIC = v2.InterpolationMode.BICUBIC
CROPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[v2.Transform]]] = {
    "bilinear": (RandomResizedCrop(24, 0.2, flip=True), [v2.RandomResizedCrop(24, (0.2, 1.0))]),
    "bicubic": (
        RandomResizedCrop(24, 0.08, flip=True, interpolation="bicubic"),
        [v2.RandomResizedCrop(24, (0.08, 1.0), interpolation=BICUBIC)],
    ),
    "square": (SquareCrop(24, 32, flip=True), [v2.Resize((32, 32)), v2.RandomCrop(24)]),
}


@pytest.mark.parametrize("name", CROPS)
def test_crops_are_torchvisions(name: str):
    ours, theirs = CROPS[name]
    images, expected = Pictures(), v2.Compose([*theirs, v2.RandomHorizontalFlip()])
    mirrored = 0
    for index in range(4):
        for seed in range(4):
            torch.manual_seed(seed)
            found = ours(images.sample(index))
            torch.manual_seed(seed)
            assert torch.equal(found, expected(images.sample(index)))
            torch.manual_seed(seed)
            mirrored += not torch.equal(found, v2.Compose(theirs)(images.sample(index)))
    assert 0 < mirrored < 16
