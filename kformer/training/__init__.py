"""Losses, metrics and learning-rate schedules."""
