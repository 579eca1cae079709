"""Providers of machines; `make_provider` picks one for an offer. Optional ones load their libraries when first used."""
