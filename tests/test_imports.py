"""The import graph: layers point down, families do not know each other, the command line starts without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dmlkit"
LAYERS = {
    "errors": 0,
    "component": 0,
    "manifolds": 1,
    "transport": 1,
    "pooling": 1,
    "miners": 1.5,
    "losses": 2,
    "regularizers": 2,
    "samplers": 2,
    "datasets": 2,
    "transforms": 2,
    "backbones": 2,
    "heads": 2,
    "optimizers": 2,
    "schedules": 2,
    "metrics": 2,
    "yaml_tree": 1,
    "recipe_extends": 2.5,
    "recipe_headers": 2.5,
    "faults": 2,
    "recipe": 3.0,
    "recipe_file": 3.1,
    "model": 3.1,
    "experiment": 3.2,
    "loading": 3.2,
    "devices": 3.2,
    "run_folder": 3.2,
    "curves": 3.2,
    "stopping": 3.2,
    "training_state": 3.3,
    "gradients": 3.3,
    "search": 4,
    "embed": 4,
    "embed_parts": 3.3,
    "embed_job": 4.1,
    "embed_files": 4.1,
    "embed_engines": 4.2,
    "embed_ray": 4.2,
    "plot": 4,
    "evaluation": 4.5,
    "curvature": 5,
    "evaluate": 5,
    "evaluate_arrays": 5.5,
    "compare": 5.5,
    "protocol": 6.5,
    "evaluation_commands": 7,
    "evaluation_tables": 6.7,
    "evaluation_cli": 7.4,
    "study_config": 6.6,
    "study_methods": 6.7,
    "study_checks": 6.71,
    "study_file": 6.72,
    "study_results": 6.7,
    "study_workers": 6.75,
    "study": 6.8,
    "study_progress": 6.7,
    "study_plot": 3,
    "study_report": 6.9,
    "study_commands": 7,
    "study_cli": 7.4,
    "train": 6,
    "export": 5,
    "export_embeddings": 5,
    "progress": 6,
    "data_check": 4,
    "data_cache": 4,
    "geometry_commands": 7,
    "data_commands": 7,
    "data_cli": 7.4,
    "commands": 7,
    "cli": 7.5,
    "__main__": 8,
}
FAMILIES = {name for name in LAYERS if (PACKAGE / name).is_dir()}


def imports_of(path: Path) -> set[str]:
    """Top-level parts of dmlkit that a file imports anywhere, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "dmlkit" else [f"dmlkit.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("dmlkit.")}
    return found - {"__version__"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":
        assert not imports_of(path)
        return
    for imported in imports_of(path) - {part}:
        assert LAYERS[imported] < LAYERS[part], f"{part} (layer {LAYERS[part]}) imports {imported}"


def test_every_family_is_placed():
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} == FAMILIES


HEAVY = ("torch", "numpy", "geoopt", "cvxpylayers", "ot", "faiss", "matplotlib", "sklearn", "pydantic")


def test_command_line_starts_without_heavy_imports():
    code = f"import dmlkit.cli, sys; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_parts_do_not_import_optional_solvers():
    heavy = ("cvxpy", "cvxpylayers", "ot", "faiss", "sklearn", "matplotlib")
    code = f"import dmlkit.recipe, dmlkit.transport, sys; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
