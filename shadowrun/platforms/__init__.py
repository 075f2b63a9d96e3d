"""Where an operator can run."""
