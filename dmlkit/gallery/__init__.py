"""Galleries: folders of labeled embeddings that grow, shrink and keep their versions, stored by LanceDB."""
