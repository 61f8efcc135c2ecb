"""Comparative reports: rows, CSV and one self-contained HTML page."""
