"""What Alembic runs: migrate the database whose connection the store hands over. It reads no configuration file."""

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
