"""The verbs that this distribution adds to the command line."""
