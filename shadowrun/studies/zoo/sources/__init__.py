"""Where programs of a zoo come from: one module for each source."""
