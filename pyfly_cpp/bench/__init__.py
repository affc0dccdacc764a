"""Measuring speed: prompts, interleaved measurement, tables and plots; and tuning, which rests on them."""
