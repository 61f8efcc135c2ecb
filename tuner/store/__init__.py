"""Trials and winners in a database; the only folder that imports SQLAlchemy and Alembic."""
