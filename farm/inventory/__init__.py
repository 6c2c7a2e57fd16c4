"""Reads and checks what a fleet is made of. The data itself lies in the top-level `inventory/` folder."""
