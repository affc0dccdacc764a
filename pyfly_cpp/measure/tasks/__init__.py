"""Tasks of evaluation: a small file for each, and what they share."""
