"""Terminal-Bench 2 tasks and the pocket pack."""
