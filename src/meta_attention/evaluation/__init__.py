"""Measurements of layers and models."""
