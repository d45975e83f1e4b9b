"""Data, schedules and the Trainer."""
