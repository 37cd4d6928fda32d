"""Snapshots without personal things: paths, names of users, hosts and projects, command lines, other processes."""
