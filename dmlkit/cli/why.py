"""``dmlkit why``: which patches of two images make them similar."""

from pathlib import Path
from typing import Annotated

from dmlkit.cli.console import percent, print_table, ranks_of, say, say_json
from dmlkit.cli.options import Checkpoint, Device, Json, RunPath, Writes, command
from dmlkit.files.outputs import check_file
from dmlkit.files.pictures import JOINED, PICTURES
from dmlkit.files.source import require_image


@command("dmlkit why runs/demo a.jpg b.jpg -o why.png")
def why(
    run: RunPath,
    a: Annotated[Path, "A", "Image.", require_image],
    b: Annotated[Path, "B", "Image to compare it with.", require_image],
    /,
    output: Annotated[Path | None, "FILE", "Picture to draw: .png, .svg or .pdf.", Writes(check_file, PICTURES)] = None,
    number: Annotated[int, "COUNT", "Number of pairs of patches to print and to join by lines.", {"min": 1}] = JOINED,
    checkpoint: Checkpoint = None,
    json: Json = False,
    device: Device = "auto",
) -> None:
    """Print which patches of two images match, and what each pair contributes to their similarity."""
    from dmlkit.identify.why import explain
    from dmlkit.plots.why import plot_explanation

    ranks = ranks_of(device)
    explanation, images = explain(run, a, b, checkpoint=checkpoint, ranks=ranks)
    if not ranks.is_global_zero:
        return
    if output is not None:
        plot_explanation(explanation, images, output, lines=number)
    if json:
        say_json(explanation.stamped())
    else:
        (rows, columns), line = explanation.grid, f"{explanation.score:.6g}"
        name = explanation.similarity.replace("_", " ")
        if explanation.threshold is not None:
            verdict = "same class" if explanation.score >= explanation.threshold else "different"
            line += f", threshold {explanation.threshold:.6g}: {verdict}"
        say(f"{name} {line}", style="bold")
        table = [["contribution", "row, column in A", "row, column in B"]]
        for *patches, contribution in explanation.strongest(number):
            ends = (f"{patch // columns + 1}, {patch % columns + 1}" for patch in patches)
            table.append([f"{contribution:.4f}", *ends])
        print_table(table, f"patches of a grid of {rows} x {columns}")
        total = sum(map(sum, explanation.contributions))
        gradient = f"{total:.4g}: they are the gradient of the {name} along the inner product"
        whole = f"the {name}" if explanation.is_sum else f"{gradient}; the rest depends on the lengths of both vectors"
        say(f"the contributions of all {(rows * columns) ** 2:,} pairs of patches sum to {whole}")
        for image, falls in zip("AB", explanation.falls, strict=True):
            most = max(falls)
            row, column = divmod(falls.index(most), columns)
            place = f"row {row + 1}, column {column + 1} of {image}"
            say(f"painting over {place} lowers the {name} most, by {most:.4f}")
        spread = max(explanation.spread)
        if spread >= 0.01:
            say(f"note: {percent(spread)} of a vector are biases, which are spread evenly over the patches")
    if output is not None:
        say(f"written to {output}")
