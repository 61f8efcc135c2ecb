"""Data only: TOML files, read by ``tuner.catalog``."""
