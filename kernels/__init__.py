"""Parametric kernels, one folder an operation; see ``base`` for the contracts."""
