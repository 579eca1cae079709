"""The commands echo2, echo-learner, echo-worker and echo-coordinator: the only place that wires the real parts together."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what a user should know of a connection is said in our own words
