from functools import partial
from typing import Any

import pytest


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's largest networks with few blocks: the others are 80 million more weights to draw, a second each.

    `tests/backbones` has them whole.
    """
    from torchvision.models import convnext, vision_transformer

    def three_blocks(build: Any, **options: Any) -> Any:
        return build(**options | {"num_layers": 3})

    def one_block_each(build: Any, stages: Any, *others: Any, **options: Any) -> Any:
        for stage in stages:
            stage.num_layers = 1
        return build(stages, *others, **options)

    for module, name, cut in (
        (vision_transformer, "_vision_transformer", three_blocks),
        (convnext, "_convnext", one_block_each),
    ):
        monkeypatch.setattr(module, name, partial(cut, getattr(module, name)))
