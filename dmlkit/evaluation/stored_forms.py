"""Comparison of the full embeddings with stored forms of fewer coordinates or bits, on the same queries."""

from collections.abc import Sequence

from dmlkit.errors import UserError
from dmlkit.evaluation.report import FormFigures, Report
from dmlkit.evaluation.result import Evaluation, Rescoring
from dmlkit.metrics.ranking.codec import RESCORED, Codec, Stored
from dmlkit.metrics.statistics import bootstrap_intervals, paired_differences


def with_stored_forms(report: Report, evaluation: Evaluation, wanted: Sequence[Stored]) -> Report:
    """Return a report with the metrics of each stored form, and their paired differences from the full embeddings.

    Raises:
        UserError: a form does not apply to the embeddings, or no metric ranks a gallery.
    """
    rescoring = evaluation.rescoring
    if not wanted or rescoring is None:
        return report
    try:
        forms = [_figures(evaluation, rescoring, stored) for stored in wanted]
    except ValueError as error:
        raise UserError(str(error)) from error
    notes = report.notes
    if any(stored.precision == "int8" for stored in wanted):
        notes = (*notes, f"int8: the ranges of the coordinates are those of {rescoring.ranges_of}")
    if any(stored.precision == "rescored" for stored in wanted):
        count = len(rescoring.points)
        all_of_them = f", which are all {count} images here" if count <= RESCORED + 1 else ""
        notes = (
            *notes,
            f"rescored: signs choose {RESCORED} candidates of each query{all_of_them}; the full vectors, kept "
            "elsewhere, order them",
        )
    return report.model_copy(update={"forms": tuple(forms), "notes": notes})


def _figures(evaluation: Evaluation, rescoring: Rescoring, stored: Stored) -> FormFigures:
    ranges = rescoring.ranges() if stored.precision == "int8" else rescoring.points
    codec = Codec(rescoring.manifold, stored, ranges)
    scores = rescoring.score(codec)
    changes = paired_differences(evaluation.scores.per_query, scores.per_query, evaluation.labels)
    intervals = bootstrap_intervals(scores.per_query, evaluation.labels)
    return FormFigures(
        dims=codec.dims,
        precision=stored.precision,
        bytes=codec.bytes,
        metrics=scores.values,
        intervals={name: interval.ends for name, interval in intervals.items()},
        differences={name: change.as_dict() for name, change in changes.items()},
    )
