"""Interchangeable evaluators behind one interface: see ``base``."""
