"""`rollhook serve`: an environment for the clients of others."""
