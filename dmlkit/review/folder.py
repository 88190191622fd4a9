"""A review with its answers: the next question, the labels, and how many of them may be wrong."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dmlkit.errors import UserError
from dmlkit.files.labels import stated_label
from dmlkit.files.lock import sole_writer
from dmlkit.files.source import REVIEW_MARK
from dmlkit.gallery.images import LabelledImage
from dmlkit.metrics.audit import LabelAudit, draws_until_together, most_wrong_together
from dmlkit.review.journal import JOURNAL, Entry, Journal, LabelAnswer, LabelQuestion, next_question
from dmlkit.review.proposals import Review

MOST_REVIEWER = 100  # characters of a name
SAME, UNSURE = "same", "?"
"""Answers that are not a label: the label is right, and a person cannot tell."""
COPIED_RIGHT = 0.95  # expected share of right labels among copied ones; it only sets the bets, see `LabelAudit`


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
    """Labels that come from an answer on another image of their group, and were not checked."""
    unknown: int
    """Images without a label that nobody has been asked about."""
    disagreements: int
    """Images on which two reviewers disagree; they get no label and count as wrong until one of them changes."""


class ReviewFolder:
    """The folder of a review. Other processes may add answers: `refresh` reads them.

    Answers count in the order of the questions, up to the first question without one, because labels that a person
    leaves out would not be missing at random. An answer also holds for the other images of its group, unless another
    answer in the group is different. The labels that this changes were not checked, and the bound on the proposed
    labels is not about them, so each counts as wrong. When copied labels of unknown images are more than half of the
    wrong labels that are allowed, they begin an audit of their own, from which questions are drawn as from the proposed
    labels; the bound is on all audits together and loses no answer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._journal, self._stamp = folder, Journal(folder / JOURNAL), None
        self.refresh()

    def refresh(self) -> None:
        """Read what other processes have written."""
        path = self.folder / REVIEW_MARK
        status = path.stat() if path.exists() else None
        stamp = status and (status.st_ino, status.st_mtime_ns)
        if stamp is None or stamp != self._stamp:
            review = Review.read(path)
            if self._stamp is not None and review.proposals != self.review.proposals:
                raise UserError(f"{self.folder}: this review was replaced by another; start the server again")
            self.review, self._stamp = review, stamp
        is_whole, entries = self._journal.new()
        if is_whole:
            self._clear()
        try:
            self._take(entries)
        except UserError:  # the next call reads the whole file again, and reports the same line
            self._journal = Journal(self._journal.path)
            raise

    def reply(self, given: Mapping[int, str | None], reviewer: str) -> int:
        """Keep answers, and return when the disk has them; the same answer again is kept once.

        Args:
            given: the answer by the position of the proposal: the correct label, ``same`` or ``?``, which may have
                capital letters and a final dot; None if the person cannot tell.

        Returns:
            Number of new answers.
        """
        if not reviewer.strip() or len(reviewer) > MOST_REVIEWER or not reviewer.isprintable():
            raise UserError(f"reviewer: expected a name of 1 to {MOST_REVIEWER} printable characters")
        if wrong := [row for row in given if not 0 <= row < len(self.review.proposals)]:
            raise UserError(f"row {wrong[0]}: expected an image of this review, 0 to {len(self.review.proposals) - 1}")
        labels = {row: None if answer is None else self._label_of(answer, row) for row, answer in given.items()}
        with sole_writer(self.folder, what="a review"):
            self.refresh()
            now = datetime.now(UTC)
            entries = [
                Entry(answer=LabelAnswer(row=row, id=proposal.id, label=label, reviewer=reviewer, time=now))
                for row, label in labels.items()
                if (proposal := self.review.proposals[row]) and self.answers(row).get(reviewer, "") != label
            ]
            if entries:
                self._add(entries)
        return len(entries)

    def _label_of(self, answer: str, row: int) -> str | None:
        """Return the label that an answer means; None for "cannot tell"."""
        word, path = answer.casefold().strip(" ."), self.review.proposals[row].path
        is_label = answer in self.review.names  # also one that reads as ``same`` or ``?``
        if word and not word.strip(UNSURE) and not is_label:
            return None
        if word != SAME or is_label:
            return stated_label(answer, path)
        if (label := self.stated(row)) is None:
            raise UserError(f"{path}: {SAME!r} needs a proposed label; write the label")
        return label

    def new_labels(self) -> dict[str, int]:
        """Return the labels that the gallery did not have when the review began, with their numbers of images."""
        counts = Counter(label for _, label in self.labeled())
        return {label: counts[label] for label in sorted(counts.keys() - {*self.review.names})}

    def ask(self, count: int) -> list[LabelQuestion]:
        """Return the first questions without an answer; new ones are chosen, and kept, until there are as many."""
        self.refresh()
        if len(waiting := self.waiting) >= count:
            return waiting[:count]
        with sole_writer(self.folder, what="a review"):
            self.refresh()
            copied = self._copied(self._changed())
            if self._begins_audit(copied):
                self._add([Entry(copied={row: str(self.label(row)) for row in copied})])
            chosen, missing = list[Entry](), count - len(self.waiting)
            left = [audit.left.copy() for audit in self._audits]
            for question in self._asked:
                audit, position = self._places[question.row]
                left[audit][position] = False
            changed, repeated = self._changed(), self._repeated()
            while missing > 0 and any(mask.any() for mask in left):
                question = self._choose(left, changed, repeated, len(self._asked) + len(chosen))
                audit, position = self._places[question.row]
                left[audit][position] = False
                if audit == 0:
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
            if any(member in self._answers for member in group):
                single += [[row]] if row not in self._answers else []
            elif row == group[0]:
                groups.append(group)
        return sorted(groups, key=len, reverse=True) + single

    @property
    def waiting(self) -> list[LabelQuestion]:
        """Questions without an answer, in their order."""
        return [question for question in self._asked[self._counted :] if question.row not in self._answers]

    def answers(self, row: int) -> dict[str, str | None]:
        """Return the last answer of each reviewer on an image."""
        return dict(self._answers.get(row, {}))

    def disagreements(self) -> list[int]:
        """Return the images on which reviewers disagree."""
        return [row for row, answers in self._answers.items() if len(set(answers.values())) > 1]

    def label(self, row: int) -> str | None:
        """Return the label of an image: as a person said, else as of its group, else as proposed; None for none."""
        if row in self._answers:
            return self.verdict(row)
        proposal = self.review.proposals[row]
        group_label = self._of_group.get(proposal.group) if proposal.group is not None else None
        return group_label or proposal.label

    def stated(self, row: int) -> str | None:
        """Return the label that a question on an image is about: the proposed one, or the one that was copied to it."""
        return self._stated.get(row)

    def labeled(self) -> list[tuple[str, str]]:
        """Return the path and the label of each image that has one."""
        labels = ((proposal.path, self.label(row)) for row, proposal in enumerate(self.review.proposals))
        return [(path, label) for path, label in labels if label is not None]

    def to_add(self) -> list[LabelledImage]:
        """Return the same images for a gallery."""
        return [LabelledImage(os.path.abspath(path), label) for path, label in self.labeled()]  # noqa: PTH100 - links

    def statement(self) -> Statement:
        """Return how many labels may be wrong, and how many answers are missing."""
        changed = self._changed()
        copied = self._copied(changed)
        labels = len(self._places) + len(copied)
        left = sum(int(audit.left.sum()) for audit in self._audits[1:])
        return Statement(
            labels=labels,
            checked=self._counted,
            corrected=sum(audit.found for audit in self._audits),
            most_wrong=min(most_wrong_together(self._audits) + len(changed), labels - self._counted),
            more_draws=min(self._draws(labels, len(changed), copied), labels - self._counted),
            spread=len(changed) + left,
            unknown=sum(len(group) for group in self.ask_unknown() if self.label(group[0]) is None),
            disagreements=len(self.disagreements()),
        )

    def _begins_audit(self, copied: list[int]) -> bool:
        """Return whether copied labels are too many to count as wrong."""
        return len(copied) > int(self.review.wrong * (len(self._places) + len(copied))) / 2

    def _draws(self, labels: int, changed: int, copied: list[int]) -> int:
        """Estimate how many draws are left, if the copied labels begin an audit once they are too many."""
        audits = list(self._audits)
        if self._begins_audit(copied):
            audits.append(self._audit_of_copies(len(copied)))
            changed -= len(copied)
        allowed = int(self.review.wrong * labels) - changed
        left = [int(audit.left.sum()) for audit in audits]
        expected = sum(audit.expected * n for audit, n in zip(audits, left, strict=True))
        return ceil(draws_until_together(audits, max(allowed, 0), expected)) + max(-allowed, 0)

    def _choose(
        self, left: Sequence[np.ndarray], changed: list[int], repeated: np.ndarray, num_asked: int
    ) -> LabelQuestion:
        review = self.review
        if len(changed) > review.wrong * review.labels:  # only checking these can lower the bound enough
            row = next((row for row in changed if row < len(left[0]) and left[0][row]), None)
            if row is not None:
                return LabelQuestion(row=row, is_draw=False)
        random = np.random.default_rng([self._counted, num_asked, review.labels])
        audit = max(
            (number for number, mask in enumerate(left) if mask.any()),
            key=lambda number: min(self._audits[number].most_wrong(), int(left[number].sum())),
        )
        if audit > 0:
            return LabelQuestion(row=int(random.choice(self._audited[audit][left[audit]])), is_draw=True)
        return next_question(self._audits[0], left[0], review.wrong, review.audit, random, repeated=repeated)

    def _clear(self) -> None:
        labels = self.review.proposals[: self.review.labels]
        self._audited = [np.arange(len(labels))]  # images of each audit
        self._places = {row: (0, row) for row in range(len(labels))}  # number of the audit of an image, place in it
        self._stated = {row: proposal.label for row, proposal in enumerate(labels)}  # label that the audit is about
        self._asked, self._rows = list[LabelQuestion](), set[int]()
        self._answers = dict[int, dict[str, str | None]]()
        self._of_group = dict[int, str | None]()
        self._recount()

    def _recount(self) -> None:
        self._counted, labels = 0, self.review.proposals[: self.review.labels]
        self._audits = [LabelAudit([proposal.probability for proposal in labels], self.review.error)]
        self._audits += [self._audit_of_copies(len(rows)) for rows in self._audited[1:]]

    def _audit_of_copies(self, count: int) -> LabelAudit:
        return LabelAudit([COPIED_RIGHT] * count, self.review.error)

    def _take(self, entries: Sequence[Entry]) -> None:
        """Take entries of the file into account."""
        counted, is_stale = {question.row for question in self._asked[: self._counted]}, False
        for entry in entries:
            self._check(entry)
            if entry.question is not None:
                self._asked.append(entry.question)
            if entry.copied is not None:
                self._places.update({row: (len(self._audited), position) for position, row in enumerate(entry.copied)})
                self._stated.update(entry.copied)
                self._audited.append(np.array(list(entry.copied)))
                self._audits.append(self._audit_of_copies(len(entry.copied)))
            if (answer := entry.answer) is None:
                continue
            is_stale |= answer.row in counted  # an answer was changed
            self._answers.setdefault(answer.row, {})[answer.reviewer] = answer.label
            group = self.review.proposals[answer.row].group
            if group is not None:  # its label is the one that all answers in it agree on
                verdicts = {self.verdict(row) for row in self.review.members[group] if row in self._answers} - {None}
                self._of_group[group] = verdicts.pop() if len(verdicts) == 1 else None
        if is_stale:
            self._recount()
        for question in self._asked[self._counted :]:
            if question.row not in self._answers:
                break
            audit, position = self._places[question.row]
            is_wrong = self.verdict(question.row) != self._stated[question.row]
            self._audits[audit].add(position, is_wrong=is_wrong, is_draw=question.is_draw)
            self._counted += 1

    def _check(self, entry: Entry) -> None:
        """Raise an error if an entry is not about this review."""
        question, answer, proposals = entry.question, entry.answer, self.review.proposals
        is_new = question is None or (question.row in self._places and question.row not in self._rows)
        is_same = answer is None or (0 <= answer.row < len(proposals) and proposals[answer.row].id == answer.id)
        is_copied = entry.copied is None or (
            bool(entry.copied) and set(entry.copied) <= set(range(len(proposals))) - set(self._places)
        )
        if not (is_new and is_same and is_copied):
            raise UserError(f"{self.folder / JOURNAL}: has a line on an image of another review; restore the file")
        if question is not None:
            self._rows.add(question.row)

    def verdict(self, row: int) -> str | None:
        """Return the label that all reviewers of an image agree on; None if they disagree, cannot tell or are none."""
        labels = set(self.answers(row).values())
        return labels.pop() if len(labels) == 1 else None

    def alike(self, row: int) -> list[int]:
        """Return the images of the group of an image, itself included."""
        group = self.review.proposals[row].group
        return [row] if group is None else self.review.members[group]

    def _changed(self) -> list[int]:
        """Return the images that were not checked and whose label is not the one that an audit is about."""
        rows = (row for group in self._of_group for row in self.review.members[group] if row not in self._answers)
        return [row for row in rows if self.label(row) not in (None, self._stated.get(row))]

    def _copied(self, changed: list[int]) -> list[int]:
        """Return those of the changed images that were unknown and that no audit is about."""
        return [row for row in changed if row not in self._places]

    def _repeated(self) -> np.ndarray:
        """Return the labels, (N,) bool, of images in groups that were asked about."""
        repeated = np.zeros(self.review.labels, dtype=bool)
        for row in self._rows | self._answers.keys():
            if row < len(repeated):
                repeated[self.alike(row)] = True
        return repeated

    def _add(self, entries: Sequence[Entry]) -> None:
        self._journal.append(entries)
        self.refresh()
