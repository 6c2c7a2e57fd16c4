"""Any program as a board runs it: its order, and the metrics in its output."""
