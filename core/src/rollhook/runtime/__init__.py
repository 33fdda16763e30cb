"""From a recipe to live objects, episodes, steps and a finished run."""
