"""Measuring speed: prompts, interleaved measurement, sweeps of a threshold, tables and plots."""
