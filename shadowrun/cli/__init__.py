"""The command line: one file per command; its docstring is its help text."""
