"""Maintenance that one worker, the leader, does for all: limits, schedules, webhooks and retention."""
