"""Alembic's scripts, frozen once released: each change of the schema is a new one."""
