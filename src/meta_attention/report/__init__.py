"""What was measured, as pages people read."""
