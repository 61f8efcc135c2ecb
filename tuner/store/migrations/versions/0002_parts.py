"""Studies of one part of a template: ``studies.part`` names it, and is empty for all others.

Such a study is never decided, so the view that dispatch reads stays as it is.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Adds the column; the studies that are there are of whole operations."""
    op.add_column("studies", sa.Column("part", sa.Text, nullable=False, server_default=""))
