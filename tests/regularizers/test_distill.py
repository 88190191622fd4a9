"""Distillation against naive loops over pairs and triplets, finite differences, and a run as the teacher."""

import os

import pytest
import torch
from torch.nn.functional import normalize

from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.recipe.schema import Recipe
from dmlkit.regularizers import Distill

LABELS = torch.zeros(6, dtype=torch.int64)


def drawn(width: int, seed: int) -> torch.Tensor:
    return torch.randn(6, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def student() -> torch.Tensor:
    return drawn(3, 1).requires_grad_()


@pytest.fixture
def teacher() -> torch.Tensor:
    return drawn(5, 2)


def huber(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    gap = (a - b).abs()
    return gap**2 / 2 if gap <= 1 else gap - 0.5


def distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((x - y) ** 2).sum().sqrt()


def naive_relational(teacher: torch.Tensor, student: torch.Tensor, angle_weight: float) -> torch.Tensor:
    n = len(teacher)
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    means = [sum(distance(x[i], x[j]) for i, j in pairs) / len(pairs) for x in (teacher, student)]
    apart = torch.zeros((), dtype=torch.float64)
    for i, j in pairs:
        t, s = (distance(x[i], x[j]) / mean for x, mean in zip((teacher, student), means, strict=True))
        apart = apart + huber(t, s)
    angle, triplets = torch.zeros((), dtype=torch.float64), 0
    for i, j in pairs:
        for k in range(n):
            if k in (i, j):
                continue
            cosines = []
            for x in (teacher, student):
                a, b = x[i] - x[j], x[k] - x[j]
                cosines.append((a @ b) / (distance(x[i], x[j]) * distance(x[k], x[j])))
            angle, triplets = angle + huber(*cosines), triplets + 1
    return apart / len(pairs) + angle_weight * angle / triplets


def naive_similarity(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    n = len(teacher)
    for i in range(n):
        rows = []
        for x in (teacher, student):
            row = [x[i] @ x[j] for j in range(n)]
            length = sum(value**2 for value in row) ** 0.5
            rows.append([value / length for value in row])
        total = total + sum((t - s) ** 2 for t, s in zip(*rows, strict=True))
    return total / n**2


def taught(teacher: torch.Tensor, space: Euclidean | Sphere, **options: object) -> Distill:
    term = Distill(space, **options)
    term.learn_from(teacher, LABELS)
    return term


def assert_same(value: torch.Tensor, expected: torch.Tensor, student: torch.Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
    gradients = (torch.autograd.grad(one, student, retain_graph=True)[0] for one in (value, expected))
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("weight", [None, 0.0, 0.5])
def test_relational_is_the_loop_over_pairs_and_triplets(student, teacher, weight):
    term = taught(teacher, Euclidean(3), angle_weight=weight)
    assert_same(term(student, LABELS), naive_relational(teacher, student, 2.0 if weight is None else weight), student)
    assert torch.autograd.gradcheck(lambda x: term(x, LABELS), student)
    term = taught(teacher, Sphere(3), angle_weight=weight)
    expected = naive_relational(teacher, normalize(student, dim=1), 2.0 if weight is None else weight)
    assert_same(term(normalize(student, dim=1), LABELS), expected, student)


def test_similarity_is_the_loop_over_rows(student: torch.Tensor, teacher: torch.Tensor):
    term = taught(teacher, Euclidean(3), kind="similarity")
    assert_same(term(student, LABELS), naive_similarity(teacher, student), student)
    assert torch.autograd.gradcheck(lambda x: term(x, LABELS), student)


@pytest.mark.parametrize("kind", ["relational", "similarity"])
def test_relations_do_not_depend_on_a_turn_or_the_scale(student: torch.Tensor, kind: str):
    turn, _ = torch.linalg.qr(drawn(6, 3)[:5, :3])
    term = taught(7 * student.detach() @ turn.T, Euclidean(3), kind=kind)
    assert term(student, LABELS).item() == pytest.approx(0, abs=1e-12)


def test_images_choose_the_points_of_the_teacher(student: torch.Tensor, teacher: torch.Tensor):
    term = taught(teacher, Euclidean(3))
    rows = torch.tensor([4, 0, 3])
    expected = naive_relational(teacher[rows], student[:3], 2.0)
    torch.testing.assert_close(term(student[:3], LABELS[:3], rows), expected)
    with pytest.raises(ValueError, match="got 6 points of the teacher for a batch of 8"):
        term(torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64))


def recipe_with(regularizer: dict[str, object], **keys: object) -> dict[str, object]:
    return {"dataset": {"name": "glyphs"}, "loss": {"name": "triplet"}, "regularizers": (regularizer,), **keys}


def refusal(regularizer: dict[str, object], **keys: object) -> str:
    with pytest.raises(ValueError) as error:
        Recipe.model_validate(recipe_with(regularizer, **keys))
    return str(error.value)


def test_what_cannot_teach_is_refused_when_the_recipe_is_read(tmp_path):
    assert "no run here" in refusal({"name": "distill", "teacher": str(tmp_path)})
    (tmp_path / "environment.json").touch()
    (tmp_path / "recipe.yaml").write_text("embedding_dim: 4\nmanifold: {name: poincare}\n")
    message = refusal({"name": "distill", "teacher": str(tmp_path)})
    assert "has embeddings on poincare; expected sphere or euclidean" in message
    (tmp_path / "recipe.yaml").write_text("embedding_dim: 4\nmanifold: {name: sphere}\n")
    message = refusal({"name": "distill", "teacher": str(tmp_path), "kind": "similarity", "angle_weight": 1.0})
    assert "angle_weight applies to kind relational" in message
    message = refusal({"name": "distill", "teacher": str(tmp_path)}, manifold={"name": "lorentz"})
    assert "distill needs manifold.name sphere or euclidean" in message


@pytest.mark.parametrize("key", [{"name": "distill", "teacher": None}, {"name": "compatible", "run": None}])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("embedding_dim: 4\nmanifold: y\n", "has no embedding_dim, or no manifold with a name"),
        ("embedding_dim: 4\nmanifold: " + "[" * 2_000, "more than 50 levels"),
        ("manifold: !!python/object:os.system {}", "the tag tag:yaml.org,2002:python/object:os.system is not allowed"),
        (None, "this is a FIFO; expected a regular file"),
    ],
)
def test_the_recipe_of_another_run_is_read_with_the_limits_of_every_recipe(key, content, message, tmp_path):
    (tmp_path / "environment.json").touch()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(content or "")
    if content is None:
        recipe.unlink()
        os.mkfifo(recipe)
    regularizer = {name: value or str(tmp_path) for name, value in key.items()}
    assert message in refusal(regularizer)
    Recipe.model_validate(recipe_with(regularizer), context={"is_trained": True})  # reads nothing
