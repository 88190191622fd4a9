"""The face that editors and type checkers see."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.heavy
def test_a_strict_consumer_finds_its_own_mistakes_and_no_fault_of_dmlkit():
    command = [sys.executable, "-m", "pyright", "-p", HERE, "--pythonpath", sys.executable, "--outputjson"]
    completed = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if not completed.stdout.startswith("{"):
        pytest.skip(f"pyright cannot run here, it needs node: {completed.stderr.strip()[-200:]}")
    report = json.loads(completed.stdout)
    assert report["summary"]["filesAnalyzed"] >= 2
    found: dict[tuple[str, int], set[str]] = {}
    for fault in report["generalDiagnostics"]:
        place = Path(fault["file"]).name, fault["range"]["start"]["line"] + 1
        found.setdefault(place, set()).add(fault["rule"])
    lines = (HERE / "mistakes.py").read_text(encoding="utf-8").splitlines()
    expected = {
        ("mistakes.py", number): line.partition("  # ")[2]
        for number, line in enumerate(lines, start=1)
        if "  # report" in line
    }
    assert {place: rules for place, rules in found.items() if place not in expected} == {}
    assert {place: rule for place, rule in expected.items() if rule not in found.get(place, ())} == {}
