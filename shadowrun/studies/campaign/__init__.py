"""Campaigns: many variants of many programs on a pair of platforms, judged, deduplicated, minimised."""
