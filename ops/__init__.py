"""Public functions with the signatures people know."""
