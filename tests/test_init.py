"""What `import dmlkit` offers, and how a name that it has not is told."""

import inspect
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
    with pytest.raises(AttributeError, match="no attribute 'fit'; it has Client, Embedder, ImageGallery, "):
        getattr(dmlkit, "fit")  # noqa: B009
