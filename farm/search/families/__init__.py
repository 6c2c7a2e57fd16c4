"""Schedule families, one module each, beyond MetaSchedule's search space. `rule` lists them."""
