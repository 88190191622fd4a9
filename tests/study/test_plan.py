"""Which runs a study takes, with figures that are told."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dmlkit.errors import UserError
from dmlkit.recipe.schema import Recipe
from dmlkit.study.definition.file import read_study
from dmlkit.study.runs.plan import Plan
from dmlkit.study.verdicts import edges_of
from tests.study.fakes import STUDY, Told, margin_of, rate_of, scale_of, write_study

TUNED = STUDY.replace("variants:", "tune: {optimizer.lr: [1e-3, 2e-3, 4e-3]}\nvariants:")


def plan_of(folder: Path, text: str) -> Plan:
    return Plan(read_study(write_study(folder, text)), folder / "out")


def end(plan: Plan, tell: Callable[[Recipe], Told]) -> list[list[str]]:
    """Let every run end as told; the names of each round."""
    rounds: list[list[str]] = []
    for runs in plan.rounds():
        rounds.append([run.name for run in runs])
        for run in runs:
            outcome = tell(run.recipe)
            if not isinstance(outcome, str):
                plan.scores[run.name], figure = outcome
                plan.figures[run.name] = {"map@r": figure}
    return [names for names in rounds if names]


def peak(best: float) -> Callable[[Recipe], tuple[float, float]]:
    """Scores that are best at one learning rate."""

    def tell(recipe: Recipe) -> tuple[float, float]:
        return -abs(np.log(rate_of(recipe) / best)), 0.5 + 0.01 * recipe.seed

    return tell


def test_tuning_seeds_choose_by_their_mean_and_their_runs_are_not_trained_twice(tmp_path: Path):
    scores = {1e-3: {0: 0.9, 1: 0.1, 7: 0.1}, 2e-3: {0: 0.5, 1: 0.5, 7: 0.5}, 4e-3: {0: 0.1, 1: 0.6, 7: 0.4}}

    def tell(recipe: Recipe) -> Told:
        return scores[rate_of(recipe)].get(recipe.seed, 0.0), 0.7

    text = TUNED.replace("seeds: [0, 1]", "seeds: [0, 1, 2]\ntune_seeds: [0, 1, 7]")
    plan = plan_of(tmp_path, text)
    first, later = end(plan, tell)
    values = ("small/lr=0.001", "small/lr=0.002", "small/lr=0.004", "large/lr=0.001")
    assert first[:4] == [f"{value}/seed-0" for value in values]
    assert len(first) == 18 and [name[-1] for name in first] == ["0"] * 6 + ["1"] * 6 + ["7"] * 6
    assert later == ["small/lr=0.002/seed-2", "large/lr=0.002/seed-2"]
    assert plan.num_runs == 20 == plan.study.num_runs
    choice = plan.results()["small"]
    means = [np.mean(list(score.values())) for score in scores.values()]
    assert choice.tuned and list(choice.tuned.validation.values()) == pytest.approx(means)
    assert choice.tuned.chosen == "lr=0.002" and list(choice.runs) == [0, 1, 2]  # seed 7 chose alone
    alone = plan_of(tmp_path, text.replace("tune_seeds: [0, 1, 7]\n", ""))
    assert end(alone, tell)[1][0] == "small/lr=0.001/seed-1"


@pytest.mark.parametrize(
    ("best", "extend", "tried", "chosen"),
    [
        (2e-3, 3, [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3], "lr=0.002"),  # not at an edge: the next best ones are
        (4e-3, 3, [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2], "lr=0.004"),
        (1.0, 2, [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2], "lr=0.016"),
        (1e-9, 2, [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3], "lr=0.00025"),
    ],
)
def test_a_choice_at_the_edge_extends_the_grid(tmp_path, best: float, extend: int, tried: list[float], chosen: str):
    plan = plan_of(tmp_path, TUNED.replace("tune:", f"extend: {extend}\ntune:"))
    rounds = end(plan, peak(best))
    assert rounds[-1] == [f"small/{chosen}/seed-1", f"large/{chosen}/seed-1"]
    for variant in plan.variants_tried():
        assert [candidate.values["optimizer.lr"] for candidate in variant.candidates] == tried
        assert [rate_of(candidate.recipe) for candidate in variant.candidates] == tried
        assert len(plan.results()[variant.name].tuned.validation) == len(tried)
    assert plan.num_runs == sum(map(len, rounds))


def test_several_keys_are_tuned_by_their_combinations_and_extended_one_at_a_time(tmp_path: Path):
    def tell(recipe: Recipe) -> Told:
        scale = -abs(np.log(scale_of(recipe) / 16))
        return peak(8e-3)(recipe)[0] + scale, 0.5

    text = TUNED.replace("{optimizer.lr: [1e-3, 2e-3, 4e-3]}", "{optimizer.lr: [1e-3, 2e-3], loss.scale: [16, 32]}")
    plan = plan_of(tmp_path, text.replace("tune:", "extend: 5\ntune:"))
    tried = [names[0].split("/")[1] for names in end(plan, tell)[1:-1]]
    assert tried == [
        "lr=0.004,scale=16",
        "lr=0.004,scale=8",  # the scale is at the edge of its grid too, and was not extended yet
        "lr=0.008,scale=16",
        "lr=0.016,scale=16",
        "lr=0.008,scale=32",  # within the grid, and not tried with this learning rate
    ]
    assert plan.chosen["small"].label == "lr=0.008,scale=16"


def test_each_variant_extends_by_itself_and_as_often_as_the_others(tmp_path: Path):
    def tell(recipe: Recipe) -> Told:
        return peak(1.0 if margin_of(recipe) == 0.3 else 2e-3)(recipe)

    rounds = end(plan_of(tmp_path, TUNED.replace("tune:", "extend: 2\ntune_seeds: [0, 1]\ntune:")), tell)
    added = [("small/lr=0.0005", "large/lr=0.008"), ("small/lr=0.008", "large/lr=0.016")]  # small is best at 0.002
    assert rounds[1:] == [[f"{name}/seed-{seed}" for seed in (0, 1) for name in names] for names in added]


def test_a_candidate_that_fails_is_not_chosen_and_ends_the_grid(tmp_path: Path):
    def tell(recipe: Recipe) -> Told:
        return "diverged" if rate_of(recipe) > 4e-3 else peak(1.0)(recipe)

    plan = plan_of(tmp_path, TUNED.replace("tune:", "extend: 3\ntune:"))
    rounds = end(plan, tell)
    assert rounds[1:] == [
        ["small/lr=0.008/seed-0", "large/lr=0.008/seed-0"],
        ["small/lr=0.0005/seed-0", "large/lr=0.0005/seed-0"],  # the other end
        ["small/lr=0.00025/seed-0", "large/lr=0.00025/seed-0"],
        ["small/lr=0.004/seed-1", "large/lr=0.004/seed-1"],
    ]
    assert [len(variant.candidates) for variant in plan.variants_tried()] == [5, 5]


def test_a_value_that_no_recipe_takes_ends_the_grid(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    text = TUNED.replace("{optimizer.lr: [1e-3, 2e-3, 4e-3]}", "{dataset.validation_fraction: [0.34, 0.68]}")
    plan = plan_of(tmp_path, text.replace("tune:", "extend: 3\ntune:"))
    rounds = end(plan, lambda recipe: (recipe.dataset.validation_fraction, 0.5))
    tried = [names[0].split("/")[1] for names in rounds[1:-1]]
    assert tried == [f"validation_fraction={value}" for value in (0.17, 0.085, 0.0425)]
    assert caplog.text.count("the grid ends here: small, beyond the edge of tune") == 1


@pytest.mark.parametrize("seed", range(4))
def test_added_values_lead_to_a_best_one_that_is_not_at_an_edge(tmp_path: Path, seed: int):
    """Scores fall with the distance from a peak that may lie outside of the grid, with another slope for each key."""
    random = np.random.default_rng(seed)
    rate, scale = 2e-3 * 2.0 ** random.uniform(-2, 2), 16 * 2.0 ** random.uniform(-2, 2)
    slopes = random.uniform(0.1, 1, 2)

    def tell(recipe: Recipe) -> Told:
        return float(-slopes @ np.abs(np.log([rate_of(recipe) / rate, scale_of(recipe) / scale]))), 0.5

    text = TUNED.replace("4e-3]}", "4e-3], loss.scale: [8, 16, 32]}").replace("tune:", "extend: 9\ntune:")
    end(plan := plan_of(tmp_path, text), tell)
    for variant in plan.variants_tried():
        assert len(variant.candidates) == 18 == len({candidate.label for candidate in variant.candidates})
        assert not edges_of(variant.candidates, plan.chosen[variant.name])


def noisy(shift: float) -> Callable[[Recipe], tuple[float, float]]:
    def tell(recipe: Recipe) -> tuple[float, float]:
        is_large = margin_of(recipe) == 0.3
        return 0.5, 0.5 + shift * is_large + 0.02 * np.random.default_rng([recipe.seed, is_large]).normal()

    return tell


@pytest.mark.parametrize(("shift", "added"), [(0.0, 4), (5.0, 0)])
def test_seeds_are_added_to_statements_that_are_not_separable(tmp_path: Path, shift: float, added: int):
    plan = plan_of(tmp_path, STUDY.replace("seeds: [0, 1]", "seeds: [0, 1, 5]\nmore_seeds: 4"))
    rounds = end(plan, noisy(shift))
    assert rounds[1:] == [[f"small/seed-{seed}", f"large/seed-{seed}"] for seed in (2, 3, 4, 6)[:added]]
    assert list(plan.results()["large"].runs) == [0, 1, 5, *(2, 3, 4, 6)[:added]]
    assert plan.num_runs == 6 + 2 * added


def test_every_seed_validates_on_the_next_fold(tmp_path: Path):
    text = TUNED.replace("tune:", "rotate_folds: true\noverrides: {dataset.split: reality_check}\ntune:")
    plan = plan_of(tmp_path, text.replace("[0, 1]", "[0, 1, 2, 5]"))
    folds: dict[str, int] = {}

    def tell(recipe: Recipe) -> Told:
        assert recipe.dataset.split == "reality_check"
        folds[f"seed-{recipe.seed}"] = recipe.dataset.fold
        return peak(1e-3)(recipe)

    end(plan, tell)
    assert folds == {"seed-0": 0, "seed-1": 1, "seed-2": 2, "seed-5": 1}


def test_only_the_variants_of_such_a_statement_get_more_seeds(tmp_path: Path):
    text = STUDY.replace("  large:", "  far: {loss.margin: 0.9}\n  large:")
    text = text.replace("[0, 1]", "[0, 1, 2]\nmore_seeds: 2")

    def tell(recipe: Recipe) -> Told:
        return (0.5, 9.0 + 0.01 * recipe.seed) if margin_of(recipe) == 0.9 else noisy(0.0)(recipe)

    plan = plan_of(tmp_path, text + "- {better: far, than: small, metric: map@r}\n")
    assert end(plan, tell)[1:] == [[f"{name}/seed-{seed}" for name in ("small", "large")] for seed in (3, 4)]


def test_a_variant_of_which_one_value_is_left_has_still_been_tuned(tmp_path: Path):
    plan = plan_of(tmp_path, TUNED)
    end(plan, lambda recipe: "diverged" if rate_of(recipe) > 1e-3 else (0.4, 0.5))
    chosen = {name: found.tuned and found.tuned.chosen for name, found in plan.results().items()}
    assert chosen == {"small": "lr=0.001", "large": "lr=0.001"}


def test_the_fold_of_the_reality_check_validates_without_a_fraction(tmp_path: Path):
    split = "{dataset.split: reality_check, dataset.validation_fraction: 0, dataset.classes: 24}"
    found = read_study(write_study(tmp_path, STUDY.replace("variants:", f"overrides: {split}\nvariants:")))
    dataset = found.variants[0].candidates[0].recipe.dataset
    assert len(dataset.build("validation").class_names) == 3  # a fourth of the first half


@pytest.mark.parametrize("resize", [None, 200])
def test_a_number_from_which_other_keys_follow_is_not_extended(resize: int | None, tmp_path: Path):
    keys = "{name: pretrained}" if resize is None else f"{{name: pretrained, resize: {resize}}}"
    lines = f"overrides: {{backbone: {{name: resnet18, weights: imagenet}}, transform: {keys}}}\n"
    lines += "extend: 1\ntune: {transform.size: [112, 168]}\n"
    path = write_study(tmp_path, STUDY.replace("variants:", f"{lines}variants:"))
    if resize is None:
        with pytest.raises(UserError) as refusal:
            read_study(path)
        first, _ = str(refusal.value).splitlines()  # one for each variant
        assert first.endswith(
            ":6: extend: small: other keys follow from transform.size (transform.size: was 112, now 168; "
            "transform.resize: was 128, now 192), so its grid cannot be extended; remove this key"
        )
    else:
        assert read_study(path).config.extend == 1
