"""From the best candidates of a campaign to records: what they compute, which is fastest, and what proves it."""
