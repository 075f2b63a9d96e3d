"""Variants of programs: recipes by number, what mutators do to a program, and how a variant runs."""
