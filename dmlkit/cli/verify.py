"""``dmlkit verify``: same or not?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmlkit.cli.options import Checkpoint, Debug, Device, Json, Plugins, RunPath
from dmlkit.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from dmlkit.evaluation.verification import Verification

app = typer.Typer()
SHOWN = 20  # pairs in the terminal


@app.command(
    epilog="Examples:  dmlkit verify runs/demo a.jpg b.jpg    dmlkit verify runs/demo --pairs pairs.csv --csv out.csv"
)
def verify(
    run: RunPath,
    images: Annotated[
        list[Path] | None, typer.Argument(metavar="[A B]", help="Two images.", show_default=False)
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(help="Instead: table with columns a, b and maybe same (1 or 0), or a pairs.txt as of LFW."),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(
            help="Folder that names in --pairs are relative to; by default the file's own.", show_default=False
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="File to write every pair to.")] = None,
    checkpoint: Checkpoint = None,
    json: Json = False,
    device: Device = "auto",
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Tell whether two images are of one class, by the threshold that calibrate found."""
    names = images or []
    if (pairs is None) == (not names) or len(names) not in (0, 2):
        raise UserError(
            "verify: give either two images or --pairs FILE, got "
            f"{len(names)} of the one and {int(pairs is not None)} of the other"
        )
    if root is not None and pairs is None:
        raise UserError("verify: --root is for --pairs; leave it out")

    from rich.console import Console

    from dmlkit.cli.console import say, say_json
    from dmlkit.cli.progress import bars
    from dmlkit.distributed.launch import start_fabric
    from dmlkit.evaluation.verification import ImagePair, is_pairs_table, read_pairs
    from dmlkit.evaluation.verification import verify as verify_pairs
    from dmlkit.files.outputs import check_output

    if csv is not None:
        check_output(csv, is_pairs_table, sources=[*names, *([pairs] if pairs else [])], option="--csv")
        if not csv.parent.is_dir():
            raise UserError(f"--csv {csv}: no such folder {csv.parent}")
    wanted = read_pairs(pairs, root) if pairs else [ImagePair(str(names[0]), str(names[1]))]
    fabric = start_fabric(device)
    console = Console(stderr=json, quiet=not fabric.is_global_zero)
    found = verify_pairs(run, wanted, checkpoint=checkpoint, fabric=fabric, bar=bars(console))
    if not fabric.is_global_zero:
        return
    if csv is not None:
        found.save(csv)
    if json:
        say_json(found.stamped())
        return
    tell(found, console)
    if csv is not None:
        say(console, f"written to {csv}")


def tell(found: "Verification", console: "Console") -> None:
    """Print the first pairs, and how right the verdicts are where that is known."""
    from dmlkit.cli.console import counted, print_table, say
    from dmlkit.evaluation.verification import answer

    is_known = found.correctness is not None
    rows = [["a", "b", "score", "verdict", *(["known"] if is_known else [])]]
    for pair in found.pairs[:SHOWN]:
        score = "" if pair.score is None else f"{pair.score:.6g}"
        known = "" if pair.known is None else answer(pair.known)
        rows.append([pair.a, pair.b, score, pair.verdict, *([known] if is_known else [])])
    print_table(rows, console, f"{found.similarity} >= {found.threshold:.6g}: the same")
    if len(found.pairs) > SHOWN:
        say(console, f"and {len(found.pairs) - SHOWN:,} more; --csv FILE or --json has all")
    if found.correctness is not None:
        right = found.correctness
        rates = [f"accuracy {right.accuracy:.4f}"]
        rates += [f"{name} {rate:.4f}" for name, rate in (("FAR", right.far), ("FRR", right.frr)) if rate is not None]
        say(console, f"{', '.join(rates)} over {right.same:,} pairs of one class and {right.different:,} of two")
    for fault in found.skipped[:SHOWN]:
        say(console, f"not read: {fault}")
    if found.skipped:
        without = sum(pair.same is None for pair in found.pairs)
        left = f"{counted(without, 'pair', 'pairs')} without a verdict"
        say(console, f"{counted(len(found.skipped), 'image', 'images')} not read; {left}")
