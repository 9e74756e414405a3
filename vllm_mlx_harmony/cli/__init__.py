"""The commands, one file each: its ``main`` takes the arguments, and returns the exit code."""
