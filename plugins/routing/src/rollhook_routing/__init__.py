"""Router policies."""
