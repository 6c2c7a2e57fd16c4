"""Sweeps: what to measure (`plan`), what visits say (`fit`), the measuring (`run`), what comes of it (`export`)."""
