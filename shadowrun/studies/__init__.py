"""Experiments made of comparisons: sweep, slowdown, static coverage."""
