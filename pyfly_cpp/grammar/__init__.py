"""Grammars of answers: JSON schemas as grammars, and the reading of grammars of strangers in processes of their own."""
