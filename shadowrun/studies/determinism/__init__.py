"""Determinism and batch invariance: whether each operator of a program repeats itself, and under what it does not."""
