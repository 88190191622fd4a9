"""What studies say of one paper's statements."""

from collections.abc import Mapping
from urllib.parse import quote

from dmlkit.errors import UserError
from dmlkit.evaluation.tables import as_markdown
from dmlkit.files.escape import markdown
from dmlkit.study.findings.results import StudyResults
from dmlkit.study.reports.report import EXPLANATION, repeat_paragraphs
from dmlkit.study.reports.tables import statement_rows, trained_rows


def of_paper(studies: Mapping[str, StudyResults], paper: str) -> dict[str, StudyResults]:
    """The studies that have statements of a paper: whole where all are, else with these and the variants they name.

    The p-values stay corrected for all statements of a study.

    Args:
        studies: by name.
        paper: as the studies' files name it under ``expect``.

    Raises:
        UserError: there is none.
    """
    found: dict[str, StudyResults] = {}
    for name, results in studies.items():
        verdicts = tuple(judged for judged in results.verdicts if judged.paper == paper)
        named = {variant for judged in verdicts for variant in (judged.better, judged.than)}
        variants = {variant: one for variant, one in results.variants.items() if variant in named}
        if verdicts and verdicts == results.verdicts:
            found[name] = results
        elif verdicts:
            found[name] = results.model_copy(update={"verdicts": verdicts, "variants": variants, "axis": None})
    if not found:
        papers = dict.fromkeys(judged.paper for results in studies.values() for judged in results.verdicts)
        known = ", ".join(filter(None, papers)) or "none; add e.g. paper: mpa to a statement under expect"
        raise UserError(f"--paper {paper}: no statement of these studies is of that paper; expected one of {known}")
    return found


def paper_paragraphs(studies: Mapping[str, StudyResults], plots: Mapping[str, str]) -> list[str]:
    """What holds of a paper, study by study: statements, figures beside them, pictures and commands.

    Args:
        studies: of `of_paper`.
        plots: where the picture of each is, from the document.
    """
    told = [as_markdown(statement_rows(studies)), as_markdown(trained_rows(studies)), EXPLANATION]
    for name, results in studies.items():
        claim = markdown(results.claim)
        setting, command = repeat_paragraphs(results)
        told += [f"**{markdown(name)}**: {claim}.", f"![{claim}]({quote(plots[name])})", setting, command]
    return told
