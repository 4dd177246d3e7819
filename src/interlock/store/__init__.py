"""Reads and writes of the aggregates, one module each, through named SQL."""
