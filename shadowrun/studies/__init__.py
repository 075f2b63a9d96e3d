"""Experiments made of comparisons: sweep, slowdown, static coverage, classes of many machines."""
