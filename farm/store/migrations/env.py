"""Alembic's entry: migrate the database of the given connection. Reads no configuration file."""

from alembic import context

from farm.store import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    render_as_batch=True,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
