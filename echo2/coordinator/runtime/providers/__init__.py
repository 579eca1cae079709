"""Providers of machines; `make_provider` makes the one for an offer. Optional ones load their libraries when first used."""
