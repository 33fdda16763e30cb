"""The command line: one module per group of verbs, imported when a verb is called."""
