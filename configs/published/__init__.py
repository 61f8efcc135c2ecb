"""Data only: how published tables write the problems of an operation; TOML files, one each."""
