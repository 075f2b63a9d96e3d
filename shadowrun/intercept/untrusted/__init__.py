"""Calls that a file names: which operators it may call, and which arguments are safe for kernels."""
