"""Explanations: whether the patches that `dmlkit why` names are those that make two images similar.

For pairs of test images of one class, the fifth of the patches of the first image with the largest contributions is
painted over with the mean color of the image, and in turn as many patches drawn at random (the mean of 5 draws). The
column `lower` is the share of pairs for which the named patches lower the similarity more. `sum` is the largest
difference between a similarity and the sum of its contributions.

Run: dmlkit train start/frozen_lite0 -o runs/grocery --set dataset.root=PHOTOS --set transform.size=160
python benchmarks/why.py runs/grocery. PHOTOS are those of the Grocery Store data set, one folder per product.
"""

import sys
from pathlib import Path

import torch
from report import write_report

from dmlkit.distributed.launch import start_ranks
from dmlkit.embedding.questions.why import pair_contributions
from dmlkit.embedding.trained import load_model
from dmlkit.loading.cache import images_of_split
from dmlkit.loading.inputs import inputs_of
from dmlkit.run_folder.folder import RunFolder

SHARE, DRAWS = 5, 5


def painted(image: torch.Tensor, patches: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Return an image (3, S, S) whose patches have its mean color."""
    rows, columns = grid
    mask = torch.zeros(rows * columns).index_fill(0, patches, 1.0).reshape(1, 1, rows, columns)
    mask = torch.nn.functional.interpolate(mask, image.shape[1:], mode="nearest")[0].bool()
    return torch.where(mask, image.float().mean((1, 2), keepdim=True).to(image.dtype), image)


def main() -> None:
    (name,) = sys.argv[1:]
    path, pairs = Path(name), 200
    run = RunFolder(path)
    trained = load_model(run, start_ranks("cpu"))
    dataset = images_of_split(trained.recipe.dataset, "test")
    inputs, model = inputs_of(dataset, trained.recipe.transform, training=False), trained.model

    def shown(index: int) -> torch.Tensor:
        found = inputs[index, 0].input
        assert isinstance(found, torch.Tensor)
        return found

    generator = torch.Generator().manual_seed(0)
    lower, worst, grid = 0, 0.0, (1, 1)
    for _ in range(pairs):
        first = int(torch.randint(len(dataset), (1,), generator=generator))
        same = (dataset.labels == dataset.labels[first]).nonzero().flatten()
        same = same[same != first]
        second = int(same[int(torch.randint(len(same), (1,), generator=generator))])
        a, b = shown(first), shown(second)
        found = pair_contributions(model, a, b)
        grid = found.grid
        worst = max(worst, abs(float(found.values.sum()) - found.score))
        count = max(1, len(found.values) // SHARE)
        named = found.values.sum(1).topk(count).indices
        drawn = [torch.randperm(len(found.values), generator=generator)[:count] for _ in range(DRAWS)]
        with torch.no_grad():
            images = torch.stack([painted(a, one, grid) for one in (named, *drawn)])
            points, (other,) = model(images), model(b[None])
            scores = trained.manifold.paired_similarity(points.double(), other.double())
        lower += bool(scores[0] < scores[1:].mean())
    backbone = getattr(trained.recipe.backbone, "model", trained.recipe.backbone.name)
    row = [backbone, f"{grid[0]} x {grid[1]}", f"{pairs}", f"{lower / pairs:.3f}", f"{worst:.0e}"]
    write_report("why", __doc__, ["backbone", "patches", "pairs", "lower", "sum"], [row])


if __name__ == "__main__":
    main()
