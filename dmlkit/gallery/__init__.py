"""Galleries: folders of labeled points that grow, shrink and keep their versions; and the one door to points."""
