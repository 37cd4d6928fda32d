"""Widgets drawn line by line."""
