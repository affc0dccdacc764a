"""Many requests at once on one model."""
