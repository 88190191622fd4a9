"""A gallery: a folder of labelled embeddings that grows, shrinks and remembers its versions, kept by LanceDB."""
