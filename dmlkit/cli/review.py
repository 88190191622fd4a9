"""``dmlkit review``: check the labels that a gallery gives, with a bound on how many are wrong."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmlkit.cli.console import bars, counted, say
from dmlkit.cli.gallery import print_incoming
from dmlkit.cli.option_groups import FusedModelOptions
from dmlkit.cli.options import Writes, command
from dmlkit.errors import UserError
from dmlkit.files.escape import command_word
from dmlkit.files.outputs import check_folder
from dmlkit.files.regular import is_video
from dmlkit.files.source import REVIEW_MARK, kind_of, require_queries, require_source

if TYPE_CHECKING:
    from dmlkit.review.folder import ReviewFolder


@command(
    "dmlkit review galleries/birds inbox -o reviews/june", "dmlkit review galleries/birds inbox -o reviews/june --add"
)
def review(
    gallery: Annotated[Path, "GALLERY", "Gallery, run, embeddings folder, or file of vectors (N, D).", require_source],
    images: Annotated[
        Path,
        "INBOX",
        "Image, video, folder or table of images, or embeddings (as GALLERY) of the same model.",
        require_queries,
    ],
    /,
    output: Annotated[
        Path,
        "FOLDER",
        "Folder of the review; created if it does not exist.",
        Writes(check_folder, "a review", REVIEW_MARK),
    ],
    number: Annotated[int, "COUNT", "Number of questions to ask next.", {"min": 1}] = 20,
    wrong: Annotated[
        float,
        "SHARE",
        "Share of labels that may be wrong in the end; the review estimates how many answers reach it.",
        {"min": 0, "max": 1},
    ] = 0.01,
    add: Annotated[bool, "Add the images with their labels to the gallery, as a new version."] = False,
    *,
    chosen: FusedModelOptions,
) -> None:
    """Check the labels that identify gives to images, and print how many of them may be wrong.

    It writes questions.csv. Write same, another label or ? (cannot tell) into its
    column answer, and run the same command again: it reads the answers and asks
    the next questions. Stop whenever you like. labels.csv has all labels. A table
    that is replaced, with your notes or corrections, is kept as NAME.old.
    """
    if add and kind_of(gallery) != "gallery":
        raise UserError(f"--add: applies to a gallery; {gallery} is something else; remove --add")
    if add and (rows := _without_files(images)):
        raise UserError(f"--add: applies to images; the {rows} of {images} have no files to add; remove --add")

    from dmlkit.review.table import LABELS
    from dmlkit.review.table import review as review_labels

    model = chosen.choose(gallery, *([] if add else [images]))  # with --add, the images are embedded
    folder, added_labels = review_labels(gallery, images, output, ask=number, wrong=wrong, model=model, bar=bars())
    print_review(folder)
    if add and added_labels:
        raise UserError(
            f"--add: {counted(len(added_labels), 'label')} new in these answers, so nothing was added; run "
            "the same command again to add them"
        )
    if add:
        from dmlkit.gallery.change import add_images
        from dmlkit.gallery.manifest import GalleryManifest

        before = GalleryManifest.of(gallery).versions[-1].number
        incoming = add_images(gallery, folder.to_add(), model=model, bar=bars())
        print_incoming(incoming, gallery)
        if incoming.added:
            say(f"to undo it: dmlkit gallery restore {command_word(gallery)} {before}")
        return
    can_add = kind_of(gallery) == "gallery" and not _without_files(images)
    say(f"all labels: {output / LABELS}" + (f"; --add adds them to {gallery}" if can_add else ""))


def _without_files(images: Path) -> str:
    """Return what the images are if they have no files of their own; an empty text if they have."""
    if kind_of(images) == "array":
        return "rows"
    return "frames" if is_video(images) else ""


def print_review(opened: "ReviewFolder") -> None:
    """Print how many labels may be wrong, and what to do next."""
    from dmlkit.review.table import QUESTIONS

    statement, wrong = opened.statement(), opened.review.wrong
    share = statement.most_wrong / statement.labels
    bound = f"of {counted(statement.labels, 'label')} at most {statement.most_wrong} ({share:.1%}) are wrong"
    say(f"{bound}, with {1 - opened.review.error:.0%} confidence, whenever you stop", style="bold")
    unknown = counted(statement.unknown, "image is", "images are")
    say(f"{statement.checked} checked, {statement.corrected} of them wrong; {unknown} unknown")
    if statement.spread:
        say(f"{counted(statement.spread, 'label comes', 'labels come')} from answers on near-duplicates")
    if new := opened.new_labels():
        known = {name.casefold(): name for name in opened.review.names}
        alike = {label: f" (not {name!r})" for label in new if (name := known.get(label.casefold()))}
        named = ", ".join(f"{label!r}{alike.get(label, '')}" for label in new)
        say(f"{counted(len(new), 'label')} that {opened.review.gallery} did not have: {named}")
        say(f"to correct one, write a path of it and another answer into {opened.folder / QUESTIONS}")
    if statement.disagreements:
        say(f"reviewers disagree on {counted(statement.disagreements, 'image')}, which get no label")
    if statement.most_wrong > wrong * statement.labels:
        more = counted(statement.more_draws, "more answer")
        say(f"about {more} on labels drawn at random would make it {wrong:.1%}")
    if opened.waiting or statement.unknown:
        say(f"next: write answers into {opened.folder / QUESTIONS}, and run this command again")
        if kind_of(Path(opened.review.gallery)) == "gallery":  # --allow-writes needs one
            gallery, folder = command_word(opened.review.gallery), command_word(opened.folder)
            say(f"or answer on a page: dmlkit serve {gallery} --review {folder} --allow-writes")
