"""What a run keeps of its calls, and how it is written."""
