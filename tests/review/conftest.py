"""The runs and photos of tests/gallery."""

from tests.gallery.conftest import place

__all__ = ["place"]
