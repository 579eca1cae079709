"""Inference engines behind the protocol of `echo2.worker.engine`."""
