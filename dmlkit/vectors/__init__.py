"""From images to points, once: models, their computation, and the folders that hold what was embedded.

Importing this package imports nothing, so that programs without torch get at `index_vectors`.
"""
