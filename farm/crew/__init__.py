"""Work on boards: queue, choice, lease, session, health and blame."""
