"""Datasets of labeled images or vectors; one file per kind."""

from typing import TYPE_CHECKING

from dmlkit.component import import_on_demand

if TYPE_CHECKING:
    from dmlkit.datasets.base import DatasetConfig
    from dmlkit.datasets.cars196 import Cars196Config
    from dmlkit.datasets.cub200 import Cub200Config
    from dmlkit.datasets.folder import FolderConfig
    from dmlkit.datasets.glyphs import GlyphsConfig
    from dmlkit.datasets.hf import HfConfig
    from dmlkit.datasets.inshop import InShopConfig
    from dmlkit.datasets.sop import SopConfig
    from dmlkit.datasets.table import TableConfig
    from dmlkit.datasets.vectors import VectorsConfig

__all__ = [
    "Cars196Config",
    "Cub200Config",
    "DatasetConfig",
    "FolderConfig",
    "GlyphsConfig",
    "HfConfig",
    "InShopConfig",
    "SopConfig",
    "TableConfig",
    "VectorsConfig",
]

import_on_demand(__name__)
