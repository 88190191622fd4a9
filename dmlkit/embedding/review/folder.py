"""A review with its answers: the next question, the labels, and how many of them may be wrong."""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dmlkit.embedding.gallery.images import LabelledImage, check_images
from dmlkit.embedding.review.journal import (
    JOURNAL,
    Entry,
    Journal,
    LabelAnswer,
    LabelQuestion,
    next_question,
    wrong_share,
)
from dmlkit.embedding.review.proposals import Review
from dmlkit.errors import UserError
from dmlkit.files.lock import sole_writer
from dmlkit.files.outputs import writing
from dmlkit.files.source import REVIEW_MARK
from dmlkit.metrics.audit import LabelAudit

MOST_REVIEWER = 100  # characters of a name


class Statement(NamedTuple):
    """How many labels may be wrong."""

    labels: int
    """Labels that the gallery gave, or that an answer gave to images of the same group."""
    checked: int
    corrected: int
    most_wrong: int
    """Largest number of wrong labels, with confidence 1 - error at any time."""
    more_draws: int
    """Estimated number of answers until the wrong labels are as few as wanted; at most all that were not checked."""
    spread: int
    """Labels that an answer on another image of their group has changed; they count as wrong until they are checked."""
    unknown: int
    """Images without a label that nobody has been asked about."""
    disagreements: int
    """Images on which two reviewers disagree; they get no label and count as wrong until one of them changes."""


class ReviewFolder:
    """The folder of a review. Other processes may add answers: `refresh` reads them.

    Answers count in the order of the questions, up to the first question without one, because labels that a person
    leaves out would not be missing at random. An answer also holds for the other images of its group, unless another
    answer in the group is different. The labels that this changes were not checked and are not those that the bound is
    about, so the bound is that on the proposed labels plus the number of changed ones: it needs no new round and loses
    no answer.

    Args:
        folder: the folder.

    Raises:
        UserError: it has no review, or a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._journal, self._stamp = folder, Journal(folder / JOURNAL), None
        self.refresh()

    def refresh(self) -> None:
        """Read what other processes have written.

        Raises:
            UserError: the review was removed or replaced by another, or a file is damaged.
        """
        path = self.folder / REVIEW_MARK
        status = path.stat() if path.exists() else None
        stamp = status and (status.st_ino, status.st_mtime_ns)
        if stamp is None or stamp != self._stamp:
            review = Review.read(path)
            if self._stamp is not None and review.proposals != self.review.proposals:
                raise UserError(f"{self.folder}: this review was replaced by another; start the server again")
            is_first, self.review, self._stamp = self._stamp is None, review, stamp
            if is_first:
                self._clear()
        is_other, entries = self._journal.new()
        if is_other:
            self._clear()
        self._take(entries)

    def reply(self, given: Mapping[int, str | None], reviewer: str) -> int:
        """Keep answers, and return when the disk has them; the same answer again is kept once.

        Args:
            given: the correct label by the position of the proposal; None if the person cannot tell.
            reviewer: name of the person.

        Returns:
            Number of new answers.

        Raises:
            UserError: there is no such proposal, a label or the name is not valid, or the disk is full; then none is
                kept.
        """
        if not reviewer.strip() or len(reviewer) > MOST_REVIEWER or not reviewer.isprintable():
            raise UserError(f"reviewer: expected a name of 1 to {MOST_REVIEWER} printable characters")
        for row, label in given.items():
            if not 0 <= row < len(self.review.proposals):
                raise UserError(f"row {row}: expected an image of this review, 0 to {len(self.review.proposals) - 1}")
            check_images([LabelledImage(self.review.proposals[row].path, label)])
        with sole_writer(self.folder, what="a review"):
            self.refresh()
            now = datetime.now(UTC)
            entries = [
                Entry(answer=LabelAnswer(row=row, id=one.id, label=label, reviewer=reviewer, time=now))
                for row, label in given.items()
                if (one := self.review.proposals[row]) and self.answers(row).get(reviewer, "") != label
            ]
            if entries:
                self._add(entries)
        return len(entries)

    def ask(self, count: int) -> list[LabelQuestion]:
        """Return the first questions without an answer; new ones are chosen, and kept, until there are as many.

        Raises:
            UserError: the folder cannot be written.
        """
        self.refresh()
        if len(waiting := self.waiting) >= count:
            return waiting[:count]
        with sole_writer(self.folder, what="a review"):
            self.refresh()
            chosen, missing, left = list[Entry](), count - len(self.waiting), self._audit.left.copy()
            left[[one.row for one in self._asked]] = False
            changed, repeated = self._changed(), self._repeated()
            while left.any() and missing > 0:
                question = self._choose(left, changed, repeated, len(self._asked) + len(chosen))
                left[question.row] = False
                repeated[self.alike(question.row)] = True
                missing -= question.row not in self._answers  # a draw may find an image that was answered already
                chosen.append(Entry(question=question))
            if chosen:
                self._add(chosen)
        return self.waiting[:count]

    def ask_unknown(self) -> list[list[int]]:
        """Return what to ask about unknown images, each a list of rows that the answer to its first one labels.

        Groups without an answer come first, the largest of them first, then the single images that have their label
        from an answer on another image.
        """
        groups, single = list[list[int]](), list[list[int]]()
        for row in range(self.review.labels, len(self.review.proposals)):
            group = self.alike(row)
            if any(one in self._answers for one in group):
                single += [[row]] if row not in self._answers else []
            elif row == group[0]:
                groups.append(group)
        return sorted(groups, key=len, reverse=True) + single

    @property
    def waiting(self) -> list[LabelQuestion]:
        """Questions without an answer, in their order."""
        return [one for one in self._asked[self._counted :] if one.row not in self._answers]

    def answers(self, row: int) -> dict[str, str | None]:
        """Return the last answer of each reviewer on an image."""
        return dict(self._answers.get(row, {}))

    def disagreements(self) -> list[int]:
        """Return the images on which reviewers disagree."""
        return [row for row, given in self._answers.items() if len(set(given.values())) > 1]

    def label(self, row: int) -> str | None:
        """Return the label of an image: as a person said, else as of its group, else as proposed; None for none."""
        if row in self._answers:
            return self._verdict(row)
        proposal = self.review.proposals[row]
        given = self._of_group.get(proposal.group) if proposal.group is not None else None
        return given or proposal.label

    def labeled(self) -> list[tuple[str, str]]:
        """Return the path and the label of each image that has one."""
        labels = ((one.path, self.label(row)) for row, one in enumerate(self.review.proposals))
        return [(path, label) for path, label in labels if label is not None]

    def to_add(self) -> list[LabelledImage]:
        """Return the same images for a gallery."""
        return [LabelledImage(os.path.abspath(path), label) for path, label in self.labeled()]  # noqa: PTH100 - links

    def statement(self) -> Statement:
        """Return how many labels may be wrong, and how many answers are missing."""
        found, size = self._audit, self.review.labels
        left, changed = int(found.left.sum()), self._changed()
        labels = size + sum(row >= size for row in changed)
        expected = min(wrong_share(found) * found.expected * left, left)
        allowed = int(self.review.wrong * labels) - len(changed)
        draws = found.draws_until(max(allowed, 0), np.array([expected]), np.array([float(left)])) if left else [0.0]
        return Statement(
            labels=labels,
            checked=self._counted,
            corrected=found.found,
            most_wrong=min(found.most_wrong() + len(changed), labels - self._counted),
            more_draws=min(ceil(draws[0]) + max(-allowed, 0), labels - self._counted),
            spread=len(changed),
            unknown=sum(len(group) for group in self.ask_unknown() if self.label(group[0]) is None),
            disagreements=len(self.disagreements()),
        )

    def set_shares(self, wrong: float, audit: float) -> None:
        """Change the share of wrong labels to reach, and that of draws; the caller is the only writer."""
        if (self.review.wrong, self.review.audit) != (wrong, audit):
            with writing(self.folder / REVIEW_MARK):
                self.review.model_copy(update={"wrong": wrong, "audit": audit}).write(self.folder / REVIEW_MARK)
            self.refresh()

    def _choose(self, left: np.ndarray, changed: list[int], repeated: np.ndarray, asked: int) -> LabelQuestion:
        review = self.review
        if len(changed) > review.wrong * review.labels:  # only checking these can lower the bound enough
            row = next((row for row in changed if row < len(left) and left[row]), None)
            if row is not None:
                return LabelQuestion(row=row, is_draw=False)
        random = np.random.default_rng([self._counted, asked, review.labels])
        return next_question(self._audit, left, review.wrong, review.audit, random, repeated=repeated)

    def _clear(self) -> None:
        self._asked, self._rows = list[LabelQuestion](), set[int]()
        self._answers = dict[int, dict[str, str | None]]()
        self._of_group = dict[int, str | None]()
        self._recount()

    def _recount(self) -> None:
        self._counted = 0
        labels = self.review.proposals[: self.review.labels]
        self._audit = LabelAudit([one.probability for one in labels], self.review.error)

    def _take(self, entries: Sequence[Entry]) -> None:
        """Take entries of the file into account."""
        counted, is_stale = {one.row for one in self._asked[: self._counted]}, False
        for entry in entries:
            self._check(entry)
            if entry.question is not None:
                self._asked.append(entry.question)
            if (given := entry.answer) is None:
                continue
            is_stale |= given.row in counted  # an answer was changed
            self._answers.setdefault(given.row, {})[given.reviewer] = given.label
            self._label_group(given.row)
        if is_stale:
            self._recount()
        for question in self._asked[self._counted :]:
            if question.row not in self._answers:
                break
            is_wrong = self._verdict(question.row) != self.review.proposals[question.row].label
            self._audit.add(question.row, is_wrong=is_wrong, is_draw=question.is_draw)
            self._counted += 1

    def _check(self, entry: Entry) -> None:
        """Raise an error if an entry is not about this review."""
        asked, given, proposals = entry.question, entry.answer, self.review.proposals
        is_new = asked is None or (0 <= asked.row < self.review.labels and asked.row not in self._rows)
        is_same = given is None or (0 <= given.row < len(proposals) and proposals[given.row].id == given.id)
        if not (is_new and is_same):
            raise UserError(f"{self.folder / JOURNAL}: has a line on an image of another review; restore the file")
        if asked is not None:
            self._rows.add(asked.row)

    def _label_group(self, row: int) -> None:
        """Keep the label of a group: the one that all answers in it agree on."""
        group = self.review.proposals[row].group
        if group is not None:
            said = {self._verdict(one) for one in self.review.members[group] if one in self._answers} - {None}
            self._of_group[group] = said.pop() if len(said) == 1 else None

    def _verdict(self, row: int) -> str | None:
        """Return the label that all reviewers of an image agree on; None if they disagree or cannot tell."""
        given = set(self._answers[row].values())
        return given.pop() if len(given) == 1 else None

    def alike(self, row: int) -> list[int]:
        """Return the images of the group of an image, itself included."""
        group = self.review.proposals[row].group
        return [row] if group is None else self.review.members[group]

    def _changed(self) -> list[int]:
        """Return the images that were not checked and whose label is no longer the proposed one."""
        rows = (row for group in self._of_group for row in self.review.members[group] if row not in self._answers)
        return [row for row in rows if self.label(row) != self.review.proposals[row].label]

    def _repeated(self) -> np.ndarray:
        """Return the labels, (N,) bool, of images in groups that were asked about."""
        found = np.zeros(self.review.labels, dtype=bool)
        for row in {one.row for one in self._asked} | {row for row in self._answers if row < len(found)}:
            found[self.alike(row)] = True
        return found

    def _add(self, entries: Sequence[Entry]) -> None:
        self._journal.append(entries)
        self.refresh()
