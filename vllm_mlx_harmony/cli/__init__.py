"""One file per command. What the command line takes is in `__main__`.

Knows files, terminals and processes; asks the other packages for everything else.
"""
