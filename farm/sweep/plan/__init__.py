"""What a sweep measures next, and who does: order, planners, conductors. Pure but for the conductors' lock."""
