"""Bring two recordings together: which file, function, line and call path of one is which of the other."""
