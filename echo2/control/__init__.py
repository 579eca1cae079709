"""A node's tie to the coordinator, the same for worker and learner: joining, one session, its pauses and waits."""
