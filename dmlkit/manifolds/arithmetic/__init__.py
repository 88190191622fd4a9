"""Matrix products that the interface of manifolds and its adapters share."""
