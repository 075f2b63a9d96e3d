"""Slowdown of each operator on a platform, with its noise: both platforms are timed alternately."""
