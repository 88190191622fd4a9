"""Plan of the runs of a study. It depends only on finished runs, so an interrupted study resumes identically."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from dmlkit.datasets.base import FOLDS
from dmlkit.errors import UserError, reason_of, warn_once
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import ClassMetrics, Metrics
from dmlkit.run_folder.folder import RunFolder
from dmlkit.study.definition.config import Candidate, Study, Variant
from dmlkit.study.definition.methods import beyond_edge, with_values
from dmlkit.study.protocol import fold_recipe
from dmlkit.study.record import ProtocolName
from dmlkit.study.runs.workers import Run
from dmlkit.study.verdicts import PairedFigures, Tuned, VariantResults, edges_of, end_text, is_decided
from dmlkit.training.experiment import Experiment, assemble


class Plan:
    """Plan of the runs of a study in rounds, and the choices of finished rounds.

    Args:
        folder: folder of the study. Its runs are in ``runs/VARIANT/seed-S``, or in ``runs/VARIANT/CHOICE/seed-S`` if
            values are tuned.
    """

    def __init__(self, study: Study, folder: Path) -> None:
        self.study, self.folder = study, folder
        self.figures: dict[str, Metrics] = {}  # on test classes, by name of a complete run
        self.scores: dict[str, float] = {}  # on validation classes, by name of a complete run
        self.tried = {variant.name: list(variant.candidates) for variant in study.variants}
        self.chosen: dict[str, Candidate] = {}  # by variant, once it is known
        self.num_runs, self.num_epochs = study.num_runs, study.num_epochs  # as far as known
        self._named: set[str] = set()  # runs of the rounds so far

    def rounds(self) -> Iterator[list[Run]]:
        """Yield rounds of runs, ordered by seed, so that an interrupted study has complete seeds.

        All runs of a round must end before the next round is requested: a complete run adds its `figures` and `scores`,
        and a failed run adds none.
        """
        study = self.study
        if not study.is_tuned:
            self._choose()
        candidates = [(variant, candidate) for variant in study.variants for candidate in variant.candidates]
        yield self._round((variant, candidate, seed) for seed in study.first_seeds for variant, candidate in candidates)
        if study.is_tuned:
            for _ in range(study.config.extend):
                added = [(variant, candidate) for variant in study.variants for candidate in self._extended(variant)]
                wanted = ((variant, candidate, seed) for seed in study.first_seeds for variant, candidate in added)
                yield self._round(wanted, added=True)
            self._choose()
        yield self._round(self._of_chosen(study.later_seeds, self.chosen))
        for number in range(1, study.config.more_seeds + 1):
            # also the seeds that a variant skipped while its statements were decided
            yield self._round(self._of_chosen(self.added_seeds[:number], self._undecided()), added=True)

    @property
    def added_seeds(self) -> tuple[int, ...]:
        """Seeds that may be added: the smallest ones that the study does not use."""
        config = self.study.config
        unused = (seed for seed in count() if seed not in config.seeds and seed not in config.tune_seeds)
        return tuple(islice(unused, config.more_seeds))

    def results(self) -> dict[str, VariantResults]:
        """Return the results of each variant that has complete runs, without differences from the reference."""
        results: dict[str, VariantResults] = {}
        for variant in self.variants_tried():
            candidate = self.chosen.get(variant.name)
            if candidate is None:
                continue
            seeds = (*self.study.config.seeds, *self.added_seeds)
            names = {seed: self.run(variant, candidate, seed).name for seed in seeds}
            figures = {seed: self.figures[name] for seed, name in names.items() if name in self.figures}
            if not figures:
                continue
            tuned = None
            if len(self.tried[variant.name]) > 1:
                scores = {scored.label: score for scored, score in self._scored(variant)}
                edge = edges_of(variant.candidates, candidate)
                tuned = Tuned(chosen=candidate.label, validation=scores, edge=edge)
            paths = {seed: RunFolder(self.run(variant, candidate, seed).folder).test_classes_path for seed in figures}
            classes = None  # those of the Reality Check would be of four models together
            if self.study.config.protocol == "official" and all(path.exists() for path in paths.values()):
                classes = {seed: ClassMetrics.read(path) for seed, path in paths.items()}
            results[variant.name] = VariantResults.of(figures, self.study.config.metrics, tuned=tuned, classes=classes)
        return results

    def variants_tried(self) -> tuple[Variant, ...]:
        """Return the variants with the candidates that were compared, including added ones and without failed ones."""
        if not self.study.is_tuned:
            return self.study.variants
        return tuple(
            replace(variant, candidates=tuple(candidate for candidate, _ in self._scored(variant)))
            for variant in self.study.variants
        )

    def edges(self) -> dict[str, str]:
        """Return by variant which of its chosen values are at an edge, in words; see `edges_of`."""
        texts = {
            variant.name: end_text(edges_of(variant.candidates, self.chosen[variant.name]))
            for variant in self.variants_tried()
            if variant.name in self.chosen
        }
        return {name: text for name, text in texts.items() if text}

    def run(self, variant: Variant, candidate: Candidate, seed: int) -> Run:
        """Return the run of a candidate with a seed."""
        folder = self.folder / "runs" / variant.name / candidate.label / f"seed-{seed}"
        recipe = candidate.recipe.model_copy(update={"seed": seed})
        if self.study.config.rotate_folds:
            recipe = recipe.model_copy(update={"dataset": recipe.dataset.model_copy(update={"fold": seed % FOLDS})})
        return Run(str(folder.relative_to(self.folder / "runs")), recipe, folder)

    def _round(self, wanted: Iterable[tuple[Variant, Candidate, int]], *, added: bool = False) -> list[Run]:
        """Return the runs that are not in an earlier round."""
        runs = [run for run in (self.run(*triple) for triple in wanted) if run.name not in self._named]
        self._named.update(run.name for run in runs)
        if added:
            self.num_runs += len(runs)
            self.num_epochs += sum(self.study.epochs_per_run(run.recipe) for run in runs)
        return runs

    def _of_chosen(self, seeds: Iterable[int], names: Iterable[str]) -> Iterator[tuple[Variant, Candidate, int]]:
        variants = [variant for variant in self.study.variants if variant.name in names]
        return ((variant, self.chosen[variant.name], seed) for seed in seeds for variant in variants)

    def _scored(self, variant: Variant) -> list[tuple[Candidate, float]]:
        """Return the candidates whose runs are all complete, with their mean scores."""
        scored: list[tuple[Candidate, float]] = []
        for candidate in self.tried[variant.name]:
            names = [self.run(variant, candidate, seed).name for seed in self.study.first_seeds]
            if all(name in self.scores for name in names):
                scored.append((candidate, fmean(self.scores[name] for name in names)))
        return scored

    def _choose(self) -> None:
        """Choose the best candidate of each variant on validation classes.

        Of equal ones it is the first of the study's file, or else of labels, as `dmlkit.study.status` finds it too.
        """
        for variant in self.study.variants:
            scored = self._scored(variant) if self.study.is_tuned else [(variant.candidates[0], 0.0)]
            if scored:
                planned = [candidate.label for candidate in variant.candidates]
                order = [*planned, *sorted({candidate.label for candidate, _ in scored} - {*planned})]
                self.chosen[variant.name] = min(scored, key=lambda pair: (-pair[1], order.index(pair[0].label)))[0]

    def _extended(self, variant: Variant) -> list[Candidate]:
        """Return one more candidate, a step from the best one that has an untried step; empty if no recipe takes any.

        While the best candidate is at an edge, its steps come first. Then those of the next best one follow, so that
        every variant tries as many values as the others.
        """
        tried = self.tried[variant.name]
        for origin, _ in sorted(self._scored(variant), key=lambda pair: -pair[1]):
            for values in beyond_edge(variant.candidates, tried, origin):
                if (candidate := self._step(variant, origin, values)) is not None:
                    tried.insert(0 if origin is tried[0] else len(tried), candidate)  # its place in a grid of one key
                    return [candidate]
        return []

    def _step(self, variant: Variant, origin: Candidate, values: Mapping[str, Any]) -> Candidate | None:
        """Return a candidate with other tuned values, or None with a warning if the recipe does not take them."""
        try:
            candidate = with_values(origin, values, f"{variant.name}, beyond the edge of tune")
            if not (self.folder / "runs" / variant.name / candidate.label).exists():
                check_recipe(self.study.config.protocol, candidate.recipe)
        except (UserError, OSError) as error:
            warn_once(f"the grid ends here: {reason_of(error)}")
            return None
        return candidate

    def _undecided(self) -> set[str]:
        """Return the variants of statements that more seeds might decide."""
        config, results = self.study.config, self.results()
        looks = len(config.seeds), len(config.seeds) + config.more_seeds
        names: set[str] = set()
        for expectation in config.expect:
            if expectation.better in results and expectation.than in results:
                pairs = PairedFigures.of(results[expectation.than], results[expectation.better], expectation.metric)
                if not is_decided(pairs, *looks, config.negligible):
                    names |= {expectation.better, expectation.than}
        return names


def check_components(study: Study, folder: Path) -> dict[str, int]:
    """Build the components of every variant without a run; return the number of validation classes by variant."""
    classes: dict[str, int] = {}
    for variant in study.variants:
        if (folder / "runs" / variant.name).exists():
            continue
        try:
            validation = check_recipe(study.config.protocol, variant.candidates[0].recipe).validation
        except (UserError, OSError) as error:
            raise UserError(f"{variant.name}: {reason_of(error)}") from error
        classes[variant.name] = len(validation.class_names) if validation else 0
    return classes


def check_recipe(protocol: ProtocolName, recipe: Recipe) -> Experiment:
    """Build the components of a recipe, or those of the first model for the Reality Check."""
    return assemble(fold_recipe(recipe, 0) if protocol == "reality_check" else recipe)
