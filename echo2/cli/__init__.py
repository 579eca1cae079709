"""The commands, and the only place where real parts are put together: echo2, echo-learner, echo-worker, echo-coordinator."""
