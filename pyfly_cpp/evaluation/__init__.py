"""Measuring what loose acceptance costs and gains: tasks, scorers, a sandbox for model code, statistics, a runner."""
