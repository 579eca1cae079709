"""Capacity, transfer, price, activation, calibration and their explanation: pure arithmetic over snapshots."""
