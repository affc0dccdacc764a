"""Measuring speed and quality: prompts and tasks, runs that resume, sweeps of a threshold, statistics and tables."""
