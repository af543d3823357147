"""Gives the result out: files, diffs, tests, and the places in the rest of the program."""
