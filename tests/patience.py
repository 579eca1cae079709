"""How long a test waits for what must come."""

WAIT_S = 600.0
"""A wait ends by state; this bound, minutes for a machine under load, only ends a test that would otherwise hang."""
