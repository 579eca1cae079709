"""The commands echo2, echo-learner, echo-worker and echo-coordinator: the only place that wires the real parts together."""
