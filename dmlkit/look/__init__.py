"""What a model sees: inspection, curvature, alignment of two models, and evidence of what answers rest on."""
