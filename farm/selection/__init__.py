"""The one standard for a record: who of some candidates is measured next, who has won, and what proves it. Pure."""
