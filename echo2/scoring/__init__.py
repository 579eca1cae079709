"""Scoring: what a version's model says of tokens that are there already. A worker does it for the learner's audits."""
