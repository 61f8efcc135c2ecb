"""Recorded search spaces: reading them from files, playing searches over them, scoring these."""
