"""The commands, one file each. `__main__` has the command line."""
