"""Types of columns that mean the same on SQLite and PostgreSQL. The revisions use them too: they may only grow."""

from __future__ import annotations

import sqlalchemy as sa

# PostgreSQL's INTEGER ends at 2^31, and its order of texts is that of a language unless told otherwise.
Integer = sa.Integer().with_variant(sa.BigInteger(), "postgresql")
Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
