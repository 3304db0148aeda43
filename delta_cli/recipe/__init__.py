"""Recipes: typed sections, TOML loading with overrides, and the reference generated from them."""

from delta_cli.recipe.document import json_schema, key_reference, to_toml
from delta_cli.recipe.loading import load_recipe, parse_recipe
from delta_cli.recipe.models import Recipe

__all__ = ["Recipe", "json_schema", "key_reference", "load_recipe", "parse_recipe", "to_toml"]
