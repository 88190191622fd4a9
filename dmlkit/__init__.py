"""dmlkit: train, evaluate, embed and export deep metric learning models.

The command line (``dmlkit --help``) and the recipes are the front door. Its components are a library too::

    from dmlkit.losses import ProxyAnchor
    from dmlkit.manifolds import Sphere

Importing this package imports neither torch nor any other heavy dependency.
"""

__version__ = "0.1.0"
