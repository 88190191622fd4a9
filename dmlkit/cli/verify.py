"""``dmlkit verify``: whether two images show the same class."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmlkit.cli.console import bars, counted, fusion_line, percent, print_table, ranks_of, say, say_json
from dmlkit.cli.options import AS_PARTNER, Checkpoint, Json, ModelDevice, RunPath, Writes, command, second_run
from dmlkit.errors import UserError
from dmlkit.files.outputs import check_file
from dmlkit.files.source import LOCAL, require_image, require_path

if TYPE_CHECKING:
    from dmlkit.evaluation.verification import Verification

SHOWN = 20  # pairs in the terminal


def require_compared(paths: list[Path]) -> None:
    """Check that there are two images, or a file of pairs."""
    if len(paths) > 2:
        raise UserError(f"verify: expected two images, or one file of pairs, got {len(paths)} paths")
    for path in paths:
        require_image(path) if len(paths) == 2 else require_path(path, "two images, or a .csv or .txt file of pairs")


@command("dmlkit verify runs/demo a.jpg b.jpg", "dmlkit verify runs/demo pairs.csv -o out.csv")
def verify(
    run: RunPath,
    compared: Annotated[
        list[Path],
        "A B|PAIRS",
        "Two images; or a table of pairs with the columns a, b and optionally same (1 or 0), or LFW's pairs.txt.",
        require_compared,
    ],
    /,
    root: Annotated[
        Path | None,
        "FOLDER",
        "Folder of the paths in PAIRS. Default: the folder of that file.",
        partial(require_path, expected="the folder of the images"),
    ] = None,
    prior: Annotated[
        float,
        "SHARE",
        "Share of the pairs that you expect to show the same class; the probabilities hold for it. The verdicts do "
        "not depend on it.",
    ] = 0.5,
    output: Annotated[Path | None, "FILE", "Write all pairs as .csv.", Writes(check_file, (".csv",))] = None,
    checkpoint: Checkpoint = None,
    second: Annotated[
        Path | None,
        "RUN|local",
        "Add a second similarity, weighted by validation classes: that of a second run of the same dataset, or of the "
        "patches of both images (local). For a run in a folder of this name, write ./local.",
        second_run(LOCAL),
        AS_PARTNER,
    ] = None,
    json: Json = False,
    device: ModelDevice = "auto",
) -> None:
    """Print whether two images show the same class, using the threshold found by calibrate."""
    from dmlkit.evaluation.verification import read_pairs
    from dmlkit.evaluation.verification import verify as verify_pairs

    wanted = read_pairs(compared, root)
    ranks = ranks_of(device)
    result = verify_pairs(run, wanted, prior=prior, checkpoint=checkpoint, second=second, ranks=ranks, bar=bars())
    if not ranks.is_global_zero:
        return
    if output is not None:
        result.save(output)
    if json:
        say_json(result.stamped())
        return
    (print_verdict if len(compared) == 2 else print_verdicts)(result)
    if result.fusion is not None:
        say(fusion_line(result.fusion.model_dump()))
    if output is not None:
        say(f"written to {output}")


def print_verdict(result: "Verification") -> None:
    """Print the verdict on a single pair, and below it the figures."""
    from dmlkit.evaluation.verification import answer

    (pair,) = result.pairs
    # images that cannot be read are an error
    assert pair.same is not None and pair.score is not None and pair.probability is not None
    say(f"{answer(pair.same)}{' class' if pair.same else ' classes'}", style="bold")
    say(f"{result.similarity} {pair.score:.6g}, threshold {threshold_text(result)}")
    say(f"probability of the same class: {percent(pair.probability)}, at a prior of {result.prior:g}")


def threshold_text(result: "Verification") -> str:
    """Return the threshold with its error rate: a low one rejects pairs that are probably of the same class."""
    return f"{result.threshold:.6g} (false accept rate {result.far:g})"


def print_verdicts(result: "Verification") -> None:
    """Print the first pairs, and the error rates if the answers are known."""
    from dmlkit.evaluation.verification import answer

    is_known = result.correctness is not None
    rows = [["verdict", *(["known"] if is_known else []), "probability", "score", "a", "b"]]
    for pair in result.pairs[:SHOWN]:
        score = "" if pair.score is None else f"{pair.score:.6g}"
        known = "" if pair.known is None else answer(pair.known)
        chance = "" if pair.probability is None else percent(pair.probability)
        rows.append([pair.verdict, *([known] if is_known else []), chance, score, pair.a, pair.b])
    print_table(rows, f"same class: {result.similarity} >= {threshold_text(result)}")
    if len(result.pairs) > SHOWN:
        say(f"and {len(result.pairs) - SHOWN:,} more; -o FILE or --json writes all")
    say(f"probability: of the same class, at a prior of {result.prior:g}")
    if result.correctness is not None:
        right = result.correctness
        rates = [f"accuracy {right.accuracy:.4f}"]
        rates += [f"{name} {rate:.4f}" for name, rate in (("FAR", right.far), ("FRR", right.frr)) if rate is not None]
        say(f"{', '.join(rates)} over {right.same:,} same-class and {right.different:,} different-class pairs")
    for fault in result.skipped[:SHOWN]:
        say(f"could not be read: {fault}")
    if result.skipped:
        left = f"{counted(sum(pair.same is None for pair in result.pairs), 'pair')} without a verdict"
        say(f"{counted(len(result.skipped), 'image')} could not be read; {left}")
