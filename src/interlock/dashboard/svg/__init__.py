"""Drawings made on the server: charts, and diagrams of the lifecycles."""
