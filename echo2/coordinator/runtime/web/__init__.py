"""The operator's page, its JSON API, metrics and health."""
