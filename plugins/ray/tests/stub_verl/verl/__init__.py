"""A double of verl."""
