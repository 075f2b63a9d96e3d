"""Seeing the user's operator calls."""
