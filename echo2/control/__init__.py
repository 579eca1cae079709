"""A node's link to the coordinator, shared by worker and learner: joining, the control session, backoff and waits."""
