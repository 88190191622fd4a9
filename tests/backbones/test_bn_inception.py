"""BN-Inception against its published tensors, and against the same network written out with NumPy."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dmlkit.backbones import BNInception
from tests.conftest import refuses

# Channels in the published checkpoint bn_inception-52deb4733.pth: in, 1x1, 3x3 reduce, 3x3, double reduce, double
# 3x3 (both), pool projection; 0 where a block has no such layer.
PUBLISHED = {
    "3a": (192, 64, 64, 64, 64, 96, 32),
    "3b": (256, 64, 64, 96, 64, 96, 64),
    "3c": (320, 0, 128, 160, 64, 96, 0),
    "4a": (576, 224, 64, 96, 96, 128, 128),
    "4b": (576, 192, 96, 128, 96, 128, 128),
    "4c": (576, 160, 128, 160, 128, 160, 128),
    "4d": (608, 96, 128, 192, 160, 192, 128),
    "4e": (608, 0, 128, 192, 192, 256, 0),
    "5a": (1056, 352, 192, 320, 160, 224, 128),
    "5b": (1024, 352, 192, 320, 192, 224, 128),
}


def convolutions() -> dict[str, tuple[int, int, int]]:
    """Name -> channels out, channels in, side."""
    found = {"conv1_7x7_s2": (64, 3, 7), "conv2_3x3_reduce": (64, 64, 1), "conv2_3x3": (192, 64, 3)}
    for block, (width, one, reduce, three, double_reduce, double, projection) in PUBLISHED.items():
        prefix = f"inception_{block}_"
        if one:
            found[f"{prefix}1x1"] = (one, width, 1)
        found[f"{prefix}3x3_reduce"] = (reduce, width, 1)
        found[f"{prefix}3x3"] = (three, reduce, 3)
        found[f"{prefix}double_3x3_reduce"] = (double_reduce, width, 1)
        found[f"{prefix}double_3x3_1"] = (double, double_reduce, 3)
        found[f"{prefix}double_3x3_2"] = (double, double, 3)
        if projection:
            found[f"{prefix}pool_proj"] = (projection, width, 1)
    return found


def published_tensors(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random tensors under the published names, in the published shapes."""
    tensors: dict[str, torch.Tensor] = {}
    for name, (after, before, side) in convolutions().items():
        scale = (2 / (before * side * side)) ** 0.5
        tensors[f"{name}.weight"] = scale * torch.randn(after, before, side, side, generator=generator)
        tensors[f"{name}.bias"] = 0.1 * torch.randn(after, generator=generator)
        for part in ("weight", "bias", "running_mean", "running_var"):
            noise = torch.randn(after, generator=generator)
            tensors[f"{name}_bn.{part}"] = 1 + 0.1 * noise if part in ("weight", "running_var") else 0.1 * noise
    tensors["last_linear.weight"], tensors["last_linear.bias"] = torch.zeros(1000, 1024), torch.zeros(1000)
    return tensors


def test_names_and_shapes_are_the_published_ones():
    tensors = published_tensors(torch.Generator())
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items() if "last_linear" not in name}
    state = BNInception().layers.state_dict()
    assert len(state) == 69 * 2 + 69 * 5 == 483  # the published 485 have the two of last_linear
    found = {name: tuple(tensor.shape) for name, tensor in state.items() if "num_batches_tracked" not in name}
    assert found == expected


def test_the_published_file_loads(tmp_path: Path):
    tensors = published_tensors(torch.Generator().manual_seed(0))
    squeezed = {name: tensor[None] if "_bn." in name else tensor for name, tensor in tensors.items()}
    torch.save(squeezed, tmp_path / "bn_inception.pth")  # the older file has batch norms of shape (1, C)
    state = BNInception(weights=str(tmp_path / "bn_inception.pth")).layers.state_dict()
    for name, tensor in tensors.items():
        assert name.startswith("last_linear") or torch.equal(state[name], tensor)
    torch.save({**tensors, "conv1_7x7_s2.weight": torch.zeros(64, 1, 7, 7)}, tmp_path / "grey.pth")
    refuses(r"conv1_7x7_s2\.weight has shape \(64, 1, 7, 7\)", BNInception, weights=str(tmp_path / "grey.pth"))
    refuses(r"expected a file, e\.g\. the download of http", BNInception.Config(weights="imagenet").build)


class Numpy:
    """The network in float64 with explicit windows, from the published list of layers."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = {name: tensor.double().numpy() for name, tensor in tensors.items()}

    def layer(self, name: str, x: np.ndarray, stride: int = 1) -> np.ndarray:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        side = weight.shape[-1]
        padded = np.pad(x, ((0, 0), (side // 2,) * 2, (side // 2,) * 2))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (side, side), (1, 2))[:, ::stride, ::stride]
        y = np.einsum("chwij,ocij->ohw", windows, weight, optimize=True) + bias[:, None, None]
        gain, shift, mean, variance = (
            self.tensors[f"{name}_bn.{part}"][:, None, None]
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        return np.maximum(gain * (y - mean) / np.sqrt(variance + 1e-5) + shift, 0)

    @staticmethod
    def halve(x: np.ndarray) -> np.ndarray:
        sides = [-(-(length - 3) // 2) + 1 for length in x.shape[1:]]  # windows that start inside, the last one cut
        rows = [
            [x[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max((1, 2)) for j in range(sides[1])] for i in range(sides[0])
        ]
        return np.array(rows).transpose(2, 0, 1)

    @staticmethod
    def smooth(x: np.ndarray, kind: str) -> np.ndarray:
        fill = 0 if kind == "avg" else -np.inf
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1)), constant_values=fill)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
        return windows.mean((3, 4)) if kind == "avg" else windows.max((3, 4))

    def block(self, name: str, x: np.ndarray) -> np.ndarray:
        p = f"inception_{name}_"
        three = self.layer(p + "3x3_reduce", x)
        double = self.layer(p + "double_3x3_1", self.layer(p + "double_3x3_reduce", x))
        if name in ("3c", "4e"):
            parts = [self.layer(p + "3x3", three, 2), self.layer(p + "double_3x3_2", double, 2), self.halve(x)]
        else:
            pooled = self.layer(p + "pool_proj", self.smooth(x, "max" if name == "5b" else "avg"))
            parts = [self.layer(p + "1x1", x), self.layer(p + "3x3", three), self.layer(p + "double_3x3_2", double)]
            parts.append(pooled)
        return np.concatenate(parts)

    def features(self, x: np.ndarray) -> np.ndarray:
        x = self.halve(self.layer("conv1_7x7_s2", x, 2))
        x = self.halve(self.layer("conv2_3x3", self.layer("conv2_3x3_reduce", x)))
        for name in PUBLISHED:
            x = self.block(name, x)
        return x.mean((1, 2))


@pytest.mark.parametrize("side", [64, 67])
def test_forward_equals_numpy(side: int, tmp_path: Path):
    tensors = published_tensors(torch.Generator().manual_seed(0))
    torch.save(tensors, tmp_path / "bn_inception.pth")
    network = BNInception(weights=str(tmp_path / "bn_inception.pth")).double().eval()
    image = torch.randn(3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = network(image[None])[0]
    theirs = torch.from_numpy(Numpy(tensors).features(image.numpy()))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_images_whose_maps_cannot_be_halved_are_refused():
    with pytest.raises(ValueError, match=r"map before block 3c is 9 x 9, expected even sides; use images of 224"):
        BNInception().eval()(torch.zeros(1, 3, 75, 75))
