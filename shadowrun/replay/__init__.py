"""Running a call elsewhere, and judging what came out."""
