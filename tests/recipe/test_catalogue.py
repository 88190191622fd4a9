import json
import subprocess
import sys
from pathlib import Path

import pytest

from dmlkit.recipe import catalogue
from dmlkit.recipe.reference import Reference


def in_new_process(code: str, directory: Path | None = None) -> str:
    """What code prints last where nothing else has been imported, nor defined members of its own."""
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=directory)
    return found.stdout.strip().splitlines()[-1]


def test_the_catalogue_is_what_the_classes_say():
    code = (
        "from dmlkit.recipe.catalogue import *; from dmlkit.recipe.describe import describe\n"
        "kept = json.loads(CATALOGUE.read_text(encoding='utf-8'))\n"
        "print(kept['fingerprint'] == fingerprint() and from_plain(kept['reference']) == describe())"
    )
    assert in_new_process(code) == "True", "write it anew: python -m dmlkit.recipe.catalogue"


HEAVY = ("torch", "numpy", "geoopt")


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["list"],
        ["list", "losses"],
        ["list", "--markdown"],
        ["list", "recipes"],
        ["schema"],
        ["copy", "glyphs/proxy_anchor", "mine.yaml"],
    ],
    ids=" ".join,
)
def test_what_only_lists_imports_no_torch(words: list[str], tmp_path: Path):
    code = (
        f"import sys; sys.argv = ['dmlkit', *{words}]\n"
        "from dmlkit.cli.app import main\n"
        "try: main()\nexcept SystemExit as end: assert end.code in (0, None), end.code\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert in_new_process(code, tmp_path) == "[]"


def test_completion_imports_no_torch(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"_DMLKIT_COMPLETE": "complete_bash", "COMP_WORDS": "dmlkit sch", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    code = (
        "import io, sys; from contextlib import redirect_stdout; sys.argv, out = ['dmlkit'], io.StringIO()\n"
        "from dmlkit.cli.app import main\n"
        "with redirect_stdout(out):\n    try: main()\n    except SystemExit: pass\n"
        f"print(out.getvalue().split(), [name for name in {HEAVY} if name in sys.modules])"
    )
    assert in_new_process(code) == "['schema'] []"


def test_a_changed_class_is_described_anew(monkeypatch: pytest.MonkeyPatch):
    described = Reference((), (), {}, {"changed": True})
    monkeypatch.setattr("dmlkit.recipe.describe.describe", lambda: described)
    assert catalogue.find_reference() != described
    monkeypatch.setattr(catalogue, "fingerprint", lambda: "another")
    assert catalogue.find_reference() == described


def test_plugins_are_described_from_their_classes(dmlkit, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from typing import Literal\nfrom dmlkit.schedules import ScheduleConfig\n"
        'class Mine(ScheduleConfig, frozen=True):\n    """Mine alone."""\n\n    name: Literal["mine"] = "mine"\n'
        "    def after_warmup(self, epoch, epochs): return 1.0\n"
    )
    described = json.loads(
        in_new_process(
            f"import sys; sys.argv = ['dmlkit', 'schema', '--plugin', {str(tmp_path / 'mine.py')!r}]\n"
            "import io, json; from contextlib import redirect_stdout; out = io.StringIO()\n"
            "from dmlkit.cli.app import main\n"
            "with redirect_stdout(out):\n    try: main()\n    except SystemExit: pass\n"
            "print(json.dumps(json.loads(out.getvalue())))"
        )
    )
    assert "Mine" in described["$defs"]
    assert "Mine" not in json.loads(dmlkit("schema").out)["$defs"]
