"""Runs each call of the program on the other platform too, and records what differs."""
