import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_early import without_torch
from tests.processes import start

HEAVY = ("torch", "numpy", "geoopt")


def test_what_lists_and_copies_recipes_imports_no_torch(tmp_path: Path):
    commands = ["--help", "list recipes", "copy glyphs/proxy_anchor mine.yaml"]
    results = without_torch(tmp_path, commands, *HEAVY)
    assert [result.code for result in results] == [0, 0, 0] and results[0].out and results[1].out


def test_completion_imports_no_torch(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"_DMLKIT_COMPLETE": "complete_bash", "COMP_WORDS": "dmlkit sch", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    code = (
        "import io, sys; from contextlib import redirect_stdout; sys.argv, out = ['dmlkit'], io.StringIO()\n"
        "from dmlkit.cli.app import main\n"
        "with redirect_stdout(out):\n    try: main()\n    except SystemExit: pass\n"
        f"print(out.getvalue().split(), [name for name in {HEAVY} if name in sys.modules])"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout == "['schema'] []\n"


def test_plugins_are_described_from_their_classes(dmlkit, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from typing import Literal\nfrom dmlkit.schedules import ScheduleConfig\n"
        'class Mine(ScheduleConfig, frozen=True):\n    """Mine alone."""\n\n    name: Literal["mine"] = "mine"\n'
        "    def after_warmup(self, epoch, epochs): return 1.0\n"
    )
    described = json.loads(start("schema", "--plugin", tmp_path / "mine.py").communicate()[0])
    assert "Mine" in described["$defs"]
    assert "Mine" not in dmlkit("schema").json()["$defs"]
