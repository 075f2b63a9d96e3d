"""What could a correct implementation have returned? Pure decisions: no platform, recorder or mode."""
