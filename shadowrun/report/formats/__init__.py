"""The formats of a report: one renderer of a `Document` each."""
