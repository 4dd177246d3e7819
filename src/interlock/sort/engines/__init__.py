"""Engines that start the workers of a sort: local processes, steps of a job, actors on a Ray cluster."""
