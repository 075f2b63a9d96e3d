"""Campaigns: variants of programs by the hundred thousand, on every platform, judged and deduplicated."""
