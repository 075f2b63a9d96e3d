"""The cause of a difference: hypotheses under which the target's result is right to rounding."""
