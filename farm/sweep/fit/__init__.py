"""What visits say together: drift, fitted models, fronts, the pick. Pure."""
