"""A backbone in two parts: its frozen blocks, whose maps can be stored, and its last blocks, which train on them."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone
from dmlkit.errors import OptionError

Hook = Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]


class FirstBlocks(Backbone):
    """All layers before the last blocks: images (B, 3, H, W) to maps, as rows (B, N) in the order of their memory.

    Args:
        whole: backbone, whose weights are shared.
        blocks: number of last blocks.
        sizes: sides in pixels of the images, which are of one size or two; the first counts for ``num_features``.

    Raises:
        UserError: the last blocks are not the only ones that read these maps.

    Example:
        >>> from dmlkit.backbones import SmallCNN
        >>> whole = SmallCNN(width=4).eval()
        >>> first, images = FirstBlocks(whole, 2, (32,)), torch.rand(3, 3, 32, 32)
        >>> first(images).shape, torch.equal(LastBlocks(first)(first(images)), whole(images))
        (torch.Size([3, 512]), True)
    """

    blank: Tensor

    def __init__(self, whole: Backbone, blocks: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.whole = whole
        block: Any = whole.blocks()[-blocks]
        self._entry: tuple[nn.Module] = (block[0] if isinstance(block, nn.ModuleList) else block,)  # in whole already
        device, side = next(whole.parameters()).device, sizes[0]
        self.register_buffer("blank", torch.zeros(1, 3, side, side, device=device), False)
        with torch.no_grad(), evaluating(whole):
            maps, *others = (self._maps(torch.zeros(1, 3, size, size, device=device)) for size in sizes)
        strides = maps.stride()
        self.order = sorted(range(1, maps.ndim), key=lambda dim: -strides[dim])  # often channels last
        self.shapes = {of_size[0].numel(): [of_size.shape[dim] for dim in self.order] for of_size in (maps, *others)}
        self.num_features = maps[0].numel()

    def forward(self, images: Tensor) -> Tensor:
        return self._maps(images).permute(0, *self.order).flatten(1)

    def restored(self, rows: Tensor) -> Tensor:
        """Return the maps (B, ...) of rows (B, N), without copying float32."""
        back = [1 + self.order.index(dim) for dim in range(1, len(self.order) + 1)]
        return rows.float().unflatten(1, self.shapes[rows.shape[1]]).permute(0, *back)

    @contextmanager
    def at_entry(self, hook: Hook) -> Generator[None]:
        """Call a hook with the input of the last blocks; what it returns takes the place of the input."""
        handle = self._entry[0].register_forward_pre_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def _maps(self, images: Tensor) -> Tensor:
        """Return the input of the last blocks, without computing these."""

        def stop(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            raise _ReachedError(inputs[0])

        with self.at_entry(stop):
            try:
                self.whole(images)
            except _ReachedError as reached:
                return reached.args[0]
        raise self._inseparable()

    @torch.no_grad()
    def check(self) -> None:
        """Raise a `UserError` if the features of two images differ when they are computed from the maps."""
        images = torch.randn(2, *self.blank.shape[1:], generator=torch.Generator().manual_seed(0)).to(self.blank.device)
        try:
            with evaluating(self.whole):
                expected, computed = self.whole(images), LastBlocks(self)(self(images))
        except (RuntimeError, ValueError):  # e.g. maps of one blank image next to those of two
            raise self._inseparable() from None
        if expected.shape != computed.shape or (expected - computed).abs().max() > 1e-3 * expected.abs().max():
            raise self._inseparable()

    def _inseparable(self) -> OptionError:
        return OptionError(
            "backbone.tuning.feature_views",
            "the last blocks of this backbone read more than one map, which cannot be stored; remove this key",
        )


@contextmanager
def evaluating(backbone: Backbone) -> Generator[None]:
    """Put a backbone into evaluation mode within the block; its frozen layers always are."""
    is_training = any(module.training for module in backbone.modules())
    backbone.eval()
    try:
        yield
    finally:
        backbone.train(is_training)


class LastBlocks(Backbone):
    """The last blocks and all that follows: maps as rows (B, N), see `FirstBlocks`, to features (B, F).

    The forward pass of the whole backbone runs, so that it may be any network: the layers before, on one blank image.
    """

    def __init__(self, first: FirstBlocks) -> None:
        super().__init__()
        self.first = first
        self.num_features = first.whole.num_features

    def forward(self, images: Tensor) -> Tensor:
        maps = self.first.restored(images)
        with self.first.at_entry(lambda _, inputs: (maps, *inputs[1:])):
            return self.first.whole(self.first.blank)


class _ReachedError(Exception):
    """The last blocks were reached with maps, its argument."""
