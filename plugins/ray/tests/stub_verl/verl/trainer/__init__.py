"""The trainers of the double."""
