"""What `import dmlkit` offers, and how a name that it has not is reported."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import dmlkit


@pytest.mark.parametrize("name", dmlkit.__all__)
def test_what_is_offered_is_there_and_documented(name: str):
    assert inspect.getdoc(getattr(dmlkit, name))
    assert name in dir(dmlkit)


def test_no_name_is_that_of_a_folder():
    """Importing ``dmlkit.gallery`` binds that module to the name, so that a function of the same name is gone."""
    folders = {path.name for path in Path(dmlkit.__path__[0]).iterdir()}
    assert not folders & {*dmlkit.__all__}


def test_another_name_is_told_with_those_there_are():
    with pytest.raises(AttributeError, match="no attribute 'fit'; available: Client, Embedder, ImageGallery, "):
        getattr(dmlkit, "fit")  # noqa: B009


def test_a_python_that_is_too_old_is_told_in_one_line():
    code = "import sys; sys.version_info = (3, 10, 13); import dmlkit.cli.app"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "dmlkit needs Python 3.11 or later; this is Python 3.10\n")
