"""Run a sweep: boards, programs, visits."""
