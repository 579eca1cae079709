"""Ids, units, errors, the clock protocol and seeded randomness. Imports nothing of echo2, does no IO."""
