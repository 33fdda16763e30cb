"""The pocket pack: thousands of small terminal tasks for a policy small enough to train on a laptop."""
