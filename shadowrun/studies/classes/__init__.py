"""Which of many machines give the same results: equivalence classes over recordings. Needs no torch."""
