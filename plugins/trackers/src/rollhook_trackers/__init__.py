"""Trackers: jsonl."""
