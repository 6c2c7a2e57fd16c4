"""Work on boards: queue, choice, lease, session, process, health and blame."""
