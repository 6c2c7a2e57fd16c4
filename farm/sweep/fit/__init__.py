"""Model a sweep's visits: drift, fit, Pareto front, pick. Pure."""
