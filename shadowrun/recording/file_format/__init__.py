"""The file of a recording, ``.shadowrec``: written in blocks, and read from anyone."""
