"""Many requests at a time on one model."""
