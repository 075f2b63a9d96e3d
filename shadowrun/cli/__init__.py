"""The command line: one file per command; `--help` never imports torch."""
