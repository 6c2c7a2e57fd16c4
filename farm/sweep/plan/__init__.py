"""Choose a sweep's next point and its board. Pure but for the conductors' lock."""
