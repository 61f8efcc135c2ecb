"""Parameters, constraints and the space of each operation; see ``space`` and ``registry``."""
