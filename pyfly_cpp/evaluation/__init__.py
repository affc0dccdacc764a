"""Measuring what loose acceptance costs and gains: tasks, scorers, containment of model code, statistics, a runner."""
