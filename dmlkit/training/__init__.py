"""Training: one visible loop, and what it writes."""
