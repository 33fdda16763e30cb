"""Keys of the clusters that `launcher: {use: ray}` brings up."""

from __future__ import annotations

from rollhook import Config


class ClusterKeys(Config):
    """Keys of `launcher.cluster`."""
