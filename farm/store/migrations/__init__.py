"""Alembic's scripts. Each is frozen once released: a change of the schema is a new one."""
