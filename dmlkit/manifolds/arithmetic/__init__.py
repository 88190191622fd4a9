"""Matrix products shared by the manifold interface and its implementations."""
