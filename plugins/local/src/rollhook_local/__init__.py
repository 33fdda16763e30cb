"""Sandboxes and a launcher on this machine."""
