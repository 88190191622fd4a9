"""``dmlkit curvature``."""

from typing import Annotated

from dmlkit.cli.console import say, say_skipped
from dmlkit.cli.options import ArrayManifold, RunDevice, SetDataset, SourcePath, SplitName, command


@command("dmlkit curvature runs/demo", "dmlkit curvature embeddings/photos")
def curvature(
    source: SourcePath,
    /,
    split: Annotated[
        SplitName | None, "SPLIT", "Split of a run: train, validation, test or all. Default: train."
    ] = None,
    overrides: SetDataset = None,
    device: RunDevice = None,
    manifold: ArrayManifold = None,
) -> None:
    """Measure how tree-like features are, and suggest a curvature for a hyperbolic space."""
    from dmlkit.look.curvature import SAMPLE, measure_curvature

    tree, points, description = measure_curvature(
        source, split=split, device=device, overrides=overrides or [], manifold=manifold
    )
    say_skipped(points.skipped)
    count = len(points)
    say(f"{count} {description}")
    samples = f"{len(tree.deltas)} samples of {min(SAMPLE, count)}"
    say(f"relative delta-hyperbolicity {tree.mean:.3f} ± {tree.deviation:.3f} ({samples}; 0 is a tree)")
    ends = tree.curvatures_within_deviation()
    within = " ({:.3f} to {:.3f} within one standard deviation of delta)".format(*ends) if ends else ""
    say(f"suggested curvature: {tree.curvature:.3f}{within}")
    say(f'try: --set "manifold={{name: poincare, curvature: {tree.curvature:.3f}}}"')
