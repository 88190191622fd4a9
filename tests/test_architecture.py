"""The tree as it is meant: layers point down, nothing goes round in a circle, a file is named as its part."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from pydantic import BaseModel

from dmlkit.losses.proxies.transport_weights import TransportWeights
from dmlkit.recipe.reference import meanings_of
from dmlkit.recipe.schema import FAMILIES, EvaluationConfig, Recipe, TrainingConfig
from dmlkit.study.definition.config import Expectation, StudyConfig, VariantConfig
from tests.conftest import LONGEST
from tests.processes import in_copies

PACKAGE = Path(__file__).parent.parent / "dmlkit"
LAYERS = {
    name: layer
    for layer, names in enumerate(
        (
            "errors",
            "_deprecated component files",
            "manifolds transport pooling distributed",
            "miners nearest",
            "losses metrics datasets backbones heads regularizers samplers optimizers schedules transforms",
            "recipe",
            "model run_folder loading",
            "vectors",
            "gallery export testing",
            "identify",
            "evaluation review",
            "plots serve training",
            "look study",
            "cli",
        )
    )
    for name in names.split()
}
MODULES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")})


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path) -> set[str]:
    """The modules of dmlkit that a file imports anywhere, also inside functions and for types only."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            named = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if {name, f"{name}.__init__"} & MODULES.keys() else node.module for name in named}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("dmlkit.")}


def circle_of(graph: dict[str, set[str]]) -> list[str]:
    """Names that lead from one to the next and back; none where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_imports_point_down():
    climbs: list[str] = []
    for module, path in MODULES.items():
        room = module.split(".")[1] if "." in module else "__init__"
        if room in ("__main__", "__init__"):  # above all
            continue
        for imported in imports_of(path):
            other = imported.split(".")[1]
            if other != room and LAYERS[other] >= LAYERS[room]:
                climbs.append(f"{module} imports {imported}")
    assert climbs == []


def test_files_and_folders_of_a_folder_make_no_circle():
    circles: list[list[str]] = []
    for folder in FOLDERS:
        place = folder.relative_to(PACKAGE.parent).parts
        graph: dict[str, set[str]] = {}
        for module, path in MODULES.items():
            parts = module.split(".")
            if tuple(parts[: len(place)]) != place or len(parts) == len(place) or parts[len(place)] == "__init__":
                continue
            child = parts[len(place)]
            others = (imported.split(".") for imported in imports_of(path))
            inside = {
                other[len(place)] for other in others if tuple(other[: len(place)]) == place and len(other) > len(place)
            }
            graph.setdefault(child, set()).update(inside - {child})
        circles.append(circle_of(graph))
    assert [circle for circle in circles if circle] == []


def test_layers_are_few_and_name_what_is_there():
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(LAYERS) == rooms - {"__init__", "__main__"}
    assert len(set(LAYERS.values())) <= 14


def test_streets_at_the_end_are_entered_by_the_command_line_alone():
    """What looks at a model, serves it or studies many can be left out of a reading; reviews are served too."""
    ends = {"look": {"cli"}, "serve": {"cli"}, "study": {"cli"}, "review": {"cli", "serve"}}
    visitors = {
        (street, module.split(".")[1])
        for module, path in MODULES.items()
        for street in {name.split(".")[1] for name in imports_of(path)} & set(ends)
        if "." in module and module.split(".")[1] not in (street, "__init__")
    }
    assert [(street, visitor) for street, visitor in sorted(visitors) if visitor not in ends[street]] == []


HEAVY = ("torch", "numpy", "geoopt", "cvxpylayers", "ot", "faiss", "matplotlib", "sklearn", "pydantic")
SOLVERS = ("geoopt", "scipy", "cvxpy", "cvxpylayers", "ot", "faiss", "sklearn", "matplotlib")
MOST = {"dmlkit.cli.search, dmlkit.identify.search": 131, "dmlkit.training.train": 141, "dmlkit.serve.app": 165}


def test_the_command_line_starts_without_heavy_imports_and_list_imports_no_training_export_or_ray():
    start = f"[*Loading().values()]; print([name for name in {HEAVY} if name in sys.modules])"
    unwanted = ["ray", *map("dmlkit.{}".format, ["training", "export", "evaluation", "vectors", "study", "loading"])]
    listed = (
        "import io; from contextlib import redirect_stdout; sys.argv = ['dmlkit', 'list', 'losses']\n"
        "with redirect_stdout(io.StringIO()):\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        f"print([name for name in {unwanted} if name in sys.modules])"
    )
    assert in_copies("from dmlkit.cli.app import Loading, main", start, listed) == ["[]", "[]"]


def test_a_recipe_imports_no_solver_and_a_command_few_modules():
    """Members of families are imported when a recipe names them: 208, 230 and 228 modules when all were."""
    solvers = f"import dmlkit.recipe.schema, dmlkit.transport; print([n for n in {SOLVERS} if n in sys.modules])"
    counted = (f"import {start}; print(sum(name.startswith('dmlkit.') for name in sys.modules))" for start in MOST)
    found, *counts = in_copies("import torch", solvers, *counted)
    assert found == "[]"
    assert [start for (start, most), count in zip(MOST.items(), counts, strict=True) if int(count) > most] == [], counts


def package_of(family: str) -> str:
    """The folder or module of a family: a room of its own or one within another family's."""
    return FAMILIES[family].__module__.removesuffix(".base")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_file_named_as_a_member_holds_it(family: str):
    """Sizes of one network may share a file, resnet18 and resnet50 that of resnet; so may members of one story."""
    for name, variant in FAMILIES[family].variants.items():
        folder, _, stem = variant.__module__.rpartition(".")
        if folder == package_of(family):
            named = next((MODULES.get(f"{folder}.{short}") for short in (name, name.rstrip("0123456789"))), None)
            assert named is None or named.stem == stem, f"{name} is in {stem}.py, not in {named.name}"


def members_of(family: str) -> dict[str, str]:
    """Name and module of what a family's folder exports: the interface, configurations, and what they build."""
    variants = [variant for variant in FAMILIES[family].variants.values() if variant.__module__.startswith("dmlkit.")]
    makers = [getattr(variant, name, None) for variant in variants for name in ("build", "create")]
    hints = (maker.__annotations__.get("return", "") for maker in makers if maker)
    built = set(re.findall(r"\w+", " ".join(map(str, hints))))
    found: dict[str, str] = {}
    for module in {FAMILIES[family].__module__, *(variant.__module__ for variant in variants)}:
        for name, kind in inspect.getmembers(importlib.import_module(module), inspect.isclass):
            wanted = kind in variants or name in built or module == FAMILIES[family].__module__
            if getattr(kind, "component", None):  # derived from a class, which is exported instead
                continue
            wanted = wanted or getattr(kind, "Config", None) in variants
            if wanted and kind.__module__ == module and not name.startswith("_"):
                assert found.setdefault(name, module) == module
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_exports_its_members_alone(family: str):
    folder, members = importlib.import_module(package_of(family)), members_of(family)
    classes = {name for name in folder.__all__ if inspect.isclass(getattr(folder, name))}
    missing = [f"from {module} import {name}" for name, module in members.items() if name not in classes]
    assert missing == [], f"add to {folder.__file__}, and the names to its __all__"
    assert {name: getattr(folder, name).__module__ for name in classes} == members
    assert family == "metrics" or set(folder.__all__) == classes  # metrics also exports what computes them


def configs() -> Iterator[type[BaseModel]]:
    """Every class that a recipe's or a study's keys belong to."""
    roots = [Recipe, TrainingConfig, EvaluationConfig, StudyConfig, VariantConfig, Expectation, TransportWeights.Config]
    yield from roots
    for family in FAMILIES.values():
        yield from family.variants.values()


def test_every_key_says_what_it_is():
    silent = {one.__name__: one.model_fields.keys() - {"name"} - meanings_of(one).keys() for one in configs()}
    assert {name: keys for name, keys in silent.items() if keys} == {}


def test_a_folder_is_worth_at_least_three_files():
    assert {str(folder) for folder in FOLDERS if len(list(folder.glob("*.py"))) < 4} == set()
    entries = [path for path in PACKAGE.iterdir() if not path.name.startswith("_")]
    assert len(entries) <= 37  # a street each; testing is what the tests of strangers import by that name


def test_no_class_has_the_name_of_another():
    found: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def parameters_of(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Names that an ``Args`` section may explain: of a class those of its constructor, or its annotated fields."""
    if isinstance(node, ast.ClassDef):
        fields = {
            part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and hasattr(part.target, "id")
        }
        makers = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        return fields.union(*map(parameters_of, makers))
    own = node.args
    both = (own.vararg, own.kwarg)
    return {one.arg for one in [*own.posonlyargs, *own.args, *own.kwonlyargs, *(one for one in both if one)]}


def test_functions_have_few_parameters():
    """At most 8, and parameters that always travel together are one object; a command has one per option."""
    many = {
        f"{module}.{node.name}"
        for module, path in MODULES.items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef) and len(parameters_of(node) - {"self", "cls"}) > 8
    }
    commands = ["calibrate", "embed", "evaluate", "identify", "search", "select", "verify"]
    assert many == {f"dmlkit.cli.{name}.{name}" for name in commands}


def test_args_name_parameters():
    others: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                section = re.search(r"^Args:\n((?: .*\n|\n)*)", (ast.get_docstring(node) or "") + "\n", re.M)
                listed = re.findall(r"^    ([\w*][\w*, ]*):", section[1], re.M) if section else []
                named = {name.strip(" *") for names in listed for name in names.split(",")}
                others += [f"{path}: {node.name}: {name}" for name in sorted(named - parameters_of(node))]
    assert others == []


def test_the_longest_test_files_are_there():
    assert [name for name in LONGEST if not (PACKAGE.parent / "tests" / name).is_file()] == []
