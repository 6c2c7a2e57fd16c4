"""Run a sweep: boards, programs, visits, retried schedules."""
