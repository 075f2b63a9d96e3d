"""What the records mean: a run in, small tables out."""
