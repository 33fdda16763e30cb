"""Programs that are carried to a node, and run inside the job of a hosted framework."""
