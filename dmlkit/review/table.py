"""A review in tables: questions that a person answers in a spreadsheet, and all labels."""

from pathlib import Path

from dmlkit.errors import UserError
from dmlkit.files.csv_table import read_csv
from dmlkit.files.escape import excerpt
from dmlkit.files.lock import sole_writer
from dmlkit.files.outputs import check_folder, write_table, writing
from dmlkit.files.source import REVIEW_MARK
from dmlkit.review.folder import ReviewFolder
from dmlkit.review.proposals import propose
from dmlkit.vectors.fusion import OWN_MODEL, ModelChoice
from dmlkit.vectors.progress_bar import Bar, no_bar

QUESTIONS, LABELS = "questions.csv", "labels.csv"
COLUMNS = ("path", "label", "answer")
REVIEWER = "table"
"""Name of the person whose answers come from the table."""


def review(
    gallery: Path,
    images: Path,
    folder: Path,
    *,
    ask: int = 20,
    wrong: float = 0.01,
    audit: float = 0.25,
    model: ModelChoice = OWN_MODEL,
    bar: Bar = no_bar,
) -> tuple[ReviewFolder, list[str]]:
    """Begin a review of the labels that a gallery gives to images, or continue it with the answers in its folder.

    The folder has ``questions.csv``, in whose column ``answer`` a person writes ``same``, another label, or ``?`` for
    "cannot tell", and ``labels.csv``, a table of the images with their labels: checked ones as the person said, the
    others as proposed. Its paths are relative to the folder of images, as with a recipe's ``dataset.root``. The answers
    are kept in ``answers.jsonl``, to which the page of ``dmlkit serve`` adds too, see `ReviewFolder`. The bound is on
    the proposals as they were when the review began; a gallery that has changed since needs a new review.

    Args:
        gallery: calibrated gallery, or other labeled points, see `identify`.
        audit: share of the questions that are drawn uniformly from all labels that were not checked.

    Returns:
        The review, and its `new_labels` that come from answers in ``questions.csv`` that were read now.
    """
    check_folder(folder, "a review", REVIEW_MARK, sources=[images])
    with sole_writer(folder, what="a review"):
        state = folder / REVIEW_MARK
        if not state.exists():
            propose(gallery, images, wrong, audit, model=model, bar=bar).write(state)
        opened = ReviewFolder(folder)
        paths = (opened.review.gallery, gallery), (opened.review.images, images)
        if any(Path(reviewed).resolve() != given.resolve() for reviewed, given in paths):
            raise UserError(
                f"--output {folder}: this is a review of {opened.review.images} in {opened.review.gallery}; choose "
                "another folder"
            )
        shares = {"wrong": wrong, "audit": audit}
        if opened.review.model_copy(update=shares) != opened.review:
            with writing(state):
                opened.review.model_copy(update=shares).write(state)
            opened.refresh()
    before = opened.new_labels()
    opened.reply(_answers(folder / QUESTIONS, opened), REVIEWER)
    opened.ask(ask)
    write_tables(opened, ask)
    return opened, [label for label in opened.new_labels() if label not in before]


def _answers(path: Path, opened: ReviewFolder) -> dict[int, str]:
    """Read what a person wrote, by row; a table without answers is that of an interrupted command."""
    if not path.exists():
        return {}
    rows = {proposal.path.strip(): row for row, proposal in enumerate(opened.review.proposals)}
    answers: dict[int, str] = {}
    for number, line in read_csv(path).rows():
        name, answer = line.get("path"), line.get("answer")
        if name not in rows or answer is None:
            raise UserError(
                f"{path}:{number}: expected the columns {', '.join(COLUMNS)} and the path of an image of this review, "
                f"got {excerpt(str(name))}; write only into the column answer"
            )
        if answer and answers.setdefault(rows[name], answer) != answer:
            raise UserError(
                f"{path}:{number}: {excerpt(name)} has the answers {excerpt(answers[rows[name]])} and "
                f"{excerpt(answer)}; keep one of them"
            )
    return answers


def write_tables(opened: ReviewFolder, ask: int) -> None:
    """Write the questions that wait, first those on labels and then one per group of unknown images, and all labels."""
    proposals = opened.review.proposals
    unknown = [group[0] for group in opened.ask_unknown()]
    rows = list(dict.fromkeys([*(question.row for question in opened.waiting), *unknown]))[:ask]
    questions = ([proposals[row].path, opened.stated(row) or "", ""] for row in rows)
    write_table(opened.folder / QUESTIONS, COLUMNS, questions, keeps_old=True)
    images = Path(opened.review.images)
    root = images if images.is_dir() else images.parent
    named = (
        # embeddings list images of anywhere, and arrays may have no paths
        (str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path, label)
        for path, label in opened.labeled()
    )
    write_table(opened.folder / LABELS, COLUMNS[:2], named, is_data=True, keeps_old=True)
