"""A node's link to the coordinator, shared by worker and learner: joining and the control session."""
