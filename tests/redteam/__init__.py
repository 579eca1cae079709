"""Hostile clients against the real daemons: one file a theme."""
