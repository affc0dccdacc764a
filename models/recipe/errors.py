"""What a user of the recipe can get wrong."""

from __future__ import annotations


class RecipeError(Exception):
    """One sentence that says what is wrong and how to put it right."""
