"""All pairs of a set of points: the scores of the same class against those of different ones, exactly."""
