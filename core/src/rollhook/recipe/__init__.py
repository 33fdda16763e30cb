"""Recipes: YAML that names plugins and gives each its keys."""
