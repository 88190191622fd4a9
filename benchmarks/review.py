"""Reviews of labels: how often the bound on wrong labels is violated, and how many answers it needs.

Ten images of three quarters of the labels form a gallery, which proposes labels for all other images; those with a
probability of at least 0.6 are reviewed. A person who knows the labels answers until the bound says that at most 1 %
(`1 %`) or 5 % (`5 %`) of all labels are wrong. Sessions differ by their random draws and by the division of the labels.

- `person errs`: share of the labels, drawn once for each division, of which the person says the opposite. A wrong label
  is then one that the person disagrees with, which is what a review says.
- `labels`, `wrong`: mean number of proposals, and share of them that is wrong.
- `violated`: share of the sessions in which the bound was ever below the number of wrong labels; at most 0.05 is said.
- `1 %`, `5 %`: median number of answers; `random` if all questions are drawn uniformly.
- `floor`: median of the fewest answers with which one test at the end could say the same: of all numbers of doubtful
  labels that are checked first, with as many draws after them as the hypergeometric distribution needs at 95 %, if the
  draws find exactly their share of the wrong labels. It knows when to stop; a review does not.

Run: dmlkit train start/frozen_lite0 -o runs/grocery --set dataset.root=PHOTOS --set transform.size=160
dmlkit train glyphs/proxy_anchor -o runs/glyphs --set dataset.images_per_class=24
dmlkit embed RUN --split test, for each; python benchmarks/review.py runs/grocery/embeddings/test
runs/glyphs/embeddings/test. PHOTOS are those of the Grocery Store data set, one folder per product. SESSIONS=N changes
the number of sessions, 1000 by default; a quarter as many draw all questions.
"""

import os
import sys
from pathlib import Path
from statistics import median

import numpy as np
from report import write_report
from scipy.stats import hypergeom

from dmlkit.gallery.sources import open_points
from dmlkit.identify.identify import Identifier
from dmlkit.metrics.audit import LabelAudit
from dmlkit.review.journal import next_question
from dmlkit.vectors.points import PointsInMemory, in_memory

SESSIONS, DIVISIONS, ENROLLED, LEAST, SHARES = int(os.environ.get("SESSIONS", "1000")), 20, 10, 0.6, (0.01, 0.05)
ERRORS = 0.0, 0.02


def part(points: PointsInMemory, rows: np.ndarray) -> PointsInMemory:
    """Return some rows of points."""
    labels = [points.labels[int(row)] for row in rows]
    names = [points.paths[int(row)] for row in rows]
    return PointsInMemory(points.source, points.manifold, points.points[rows], names, labels)


def proposals(points: PointsInMemory, division: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities of proposed labels and whether they are right."""
    random = np.random.default_rng(division)
    names, codes = np.unique(np.array(points.labels), return_inverse=True)
    known = random.permutation(len(names))[: 3 * len(names) // 4]
    enrolled = np.concatenate([random.permutation(np.flatnonzero(codes == code))[:ENROLLED] for code in known])
    unlabeled = np.setdiff1d(np.arange(len(codes)), enrolled)
    identified = Identifier(part(points, enrolled)).answers(part(points, unlabeled), [None] * len(unlabeled))
    chance = np.array([answer.probability or 0.0 for answer in identified.answers])
    right = np.array(
        [answer.guess == points.labels[row] for answer, row in zip(identified.answers, unlabeled, strict=True)]
    )
    return chance[chance >= LEAST], right[chance >= LEAST]


def erring(right: np.ndarray, division: int, share: float) -> np.ndarray:
    """Return whether labels are right by a person who says the opposite of a share of them."""
    return right ^ (np.random.default_rng(division).random(len(right)) < share)


def session(chance: np.ndarray, right: np.ndarray, seed: int, wrong: float, audit: float) -> tuple[bool, int]:
    """Return whether the bound was ever violated, and the number of answers until it reached a share."""
    random, label_audit, violated = np.random.default_rng(seed), LabelAudit(chance), False
    for answers in range(1, len(chance) + 1):
        question = next_question(label_audit, label_audit.left, wrong, audit, random)
        label_audit.add(question.row, is_wrong=not right[question.row], is_draw=question.is_draw)
        bound = label_audit.most_wrong()
        violated |= int((~right & label_audit.left).sum()) > bound
        if bound <= int(wrong * len(chance)):
            return violated, answers
    return violated, len(chance)


def floor(chance: np.ndarray, right: np.ndarray, wrong: float) -> int:
    """Return the fewest answers after which a single test bounds the share of wrong labels, see above."""
    is_wrong, most, best = ~right[np.argsort(chance)], int(wrong * len(chance)), len(chance)
    for checked in range(len(chance)):
        left, missed = len(chance) - checked, int(is_wrong[checked:].sum())
        draws = np.arange(max(best - checked, 0))  # more would not be the fewest
        drawn_wrong = np.rint(missed * draws / left).astype(int)
        beyond = drawn_wrong + most + 1  # wrong labels before the draws, of which one too many is left
        enough = (missed - drawn_wrong <= most) & (
            (beyond > left) | (hypergeom.cdf(drawn_wrong, left, beyond, draws) <= 0.05)
        )
        best = checked + int(enough.argmax()) if enough.any() else best
    return best


def measured(divided: list[tuple[np.ndarray, np.ndarray]]) -> list[str]:
    """Return the cells of a row, for the proposals of each division."""
    answers, violations = list[str](), list[bool]()
    for wrong in SHARES:
        for audit, count in ((0.25, SESSIONS), (1.0, SESSIONS // 4)):
            sessions = [session(*divided[seed % DIVISIONS], seed, wrong, audit) for seed in range(count)]
            answers.append(f"{median(outcome[1] for outcome in sessions):.0f}")
            violations += [outcome[0] for outcome in sessions]
        answers.append(f"{median(floor(*division, wrong) for division in divided):.0f}")
    labels = np.mean([len(right) for _, right in divided])
    share = np.mean([(~right).mean() for _, right in divided])
    return [f"{SESSIONS}", f"{labels:.0f}", f"{share:.3f}", f"{np.mean(violations):.3f}", *answers]


def main() -> None:
    rows: list[list[str]] = []
    for name in sys.argv[1:]:
        points = in_memory(open_points(Path(name)))
        divided = [proposals(points, division) for division in range(DIVISIONS)]
        for share in ERRORS:
            judged = [(chance, erring(right, division, share)) for division, (chance, right) in enumerate(divided)]
            rows.append([name, f"{share:g}", *measured(judged)])
    header = ["embeddings", "person errs", "sessions", "labels", "wrong", "violated"]
    header += [f"{100 * wrong:.0f} %{kind}" for wrong in SHARES for kind in ("", " random", " floor")]
    write_report("review", __doc__, header, rows)


if __name__ == "__main__":
    main()
