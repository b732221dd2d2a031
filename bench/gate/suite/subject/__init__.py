"""A small package, of which every commit has the same code and other constants."""
