"""Index vectors for programs without torch. tests/contracts/test_manifolds.py holds them against every manifold."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from dmlkit.vectors.index_vectors import index_vectors


def test_they_need_numpy_alone():
    code = (
        "import sys, dmlkit.vectors.index_vectors\n"
        "print([name for name in sys.modules if name in ('torch', 'pydantic', 'pyarrow', 'faiss')"
        " or name.startswith('dmlkit.') and name.split('.')[1] not in ('vectors', 'errors', 'component')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("points", "form", "side", "message"),
    [
        (np.zeros(3), "as_is", "query", r"shape \(N, D\), got \(3,\)"),
        (np.zeros((2, 3)), "as_is", "left", "side is 'left'; expected 'query' or 'gallery'"),
        (np.zeros((2, 3)), "x / norm(x)", "query", "unknown form 'x / norm\\(x\\)'"),
    ],
)
def test_what_is_none_is_refused(points: Any, form: str, side: Any, message: str):
    with pytest.raises(ValueError, match=message):
        index_vectors(points, {"form": form, "curvature": None}, side)
