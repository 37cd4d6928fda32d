"""The truth behind every allocation of a recording, found without any of memtrace's own rules.

Two runs of one deterministic program: one recorded as a user would, one in which every allocation is stamped with the
operator that asked for it (:mod:`stamps`). Both are aligned, and each allocation is labelled by identity or operator.
"""
