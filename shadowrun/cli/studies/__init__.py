"""The commands of `shadowrun.studies`, one file each."""
