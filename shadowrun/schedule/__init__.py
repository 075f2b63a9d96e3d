"""Which calls are compared: by selection, and by an overhead budget."""
