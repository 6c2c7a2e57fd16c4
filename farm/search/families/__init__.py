"""Families of schedules, one module each: what stock MetaSchedule's space does not contain. `rule` lists them."""
