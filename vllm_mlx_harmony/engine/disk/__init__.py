"""The disk below the prefix cache: files of pieces, and an index of what they hold."""
