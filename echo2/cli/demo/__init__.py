"""`echo2 demo`: runs the whole system on one machine, as real processes, with a live screen and a summary."""
