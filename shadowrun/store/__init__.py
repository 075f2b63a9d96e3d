"""Keeping what was seen."""
