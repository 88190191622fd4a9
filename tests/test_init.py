"""What `import dmlkit` offers, and how a name that it has not is told."""

import inspect

import pytest

import dmlkit


@pytest.mark.parametrize("name", dmlkit.__all__)
def test_what_is_offered_is_there_and_documented(name: str):
    assert inspect.getdoc(getattr(dmlkit, name))
    assert name in dir(dmlkit)


def test_another_name_is_told_with_those_there_are():
    with pytest.raises(AttributeError, match="no attribute 'fit'; it has Client, Embedder, ImageGallery, "):
        getattr(dmlkit, "fit")  # noqa: B009
