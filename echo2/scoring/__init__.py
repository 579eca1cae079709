"""Scoring: log-probabilities of existing tokens under a version's model. Workers do it for the learner's audits."""
