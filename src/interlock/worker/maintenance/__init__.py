"""Maintenance work that one elected worker does: limits, schedules, webhooks, retention."""
