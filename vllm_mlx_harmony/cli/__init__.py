"""The commands, one file each. The command line itself is in `__main__`."""
