"""An exponential moving average of the weights, which is steadier than where the last step left them."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from dmlkit.model import EmbeddingModel


class WeightAverage:
    """What ``training.ema`` keeps of a model's weights; running statistics of batch norms stay the model's own.

    Args:
        model: whose weights; those that its tuning leaves as they were have no average.
        decay: the share of the average that each step leaves, in (0, 1).

    Example:
        >>> from dmlkit.recipe import parse_recipe
        >>> from dmlkit.model import build_model
        >>> model = build_model(parse_recipe("{dataset: {name: glyphs}, loss: {name: triplet}}", "recipe.yaml"))
        >>> average = WeightAverage(model, 0.75)
        >>> _ = model.head.linear.bias.data.fill_(4.0)
        >>> average.update()
        >>> average.weights()["head.linear.bias"][:2]
        tensor([1., 1.])
    """

    def __init__(self, model: EmbeddingModel, decay: float) -> None:
        frozen = model.frozen_weights()
        self.model_weights = {name: weight for name, weight in model.named_parameters() if name not in frozen}
        self.averages = [weight.detach().clone() for weight in self.model_weights.values()]
        self.take_in = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of a step."""
        latest = list(self.model_weights.values())
        self.averages = [old.to(new.device) for old, new in zip(self.averages, latest, strict=True)]
        self.take_in(tuple(self.averages), tuple(latest), 0)

    def weights(self) -> dict[str, Tensor]:
        """The averages by the names of the model's state dict."""
        return dict(zip(self.model_weights, self.averages, strict=True))

    @torch.no_grad()
    def restore(self, averages: Mapping[str, Tensor], latest: Mapping[str, Tensor]) -> None:
        """Go on from averages, and from the latest weights, which the model takes."""
        self.averages = [averages[name].to(weight.device) for name, weight in self.model_weights.items()]
        for name, weight in self.model_weights.items():
            weight.copy_(latest[name])

    @torch.no_grad()
    def put_in_place(self) -> None:
        """Give the averages to the model."""
        for weight, average in zip(self.model_weights.values(), self.averages, strict=True):
            weight.copy_(average)

    @contextmanager
    def in_place(self) -> Generator[None]:
        """The model has the averages while the block runs."""
        latest = [weight.detach().clone() for weight in self.model_weights.values()]
        self.put_in_place()
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, own in zip(self.model_weights.values(), latest, strict=True):
                    weight.copy_(own)
