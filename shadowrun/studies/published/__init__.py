"""The experiments of published work as commands: `shadowrun study NAME`."""
