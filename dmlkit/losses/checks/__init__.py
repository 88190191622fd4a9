"""What losses ask of a batch and of a manifold before they compute."""
