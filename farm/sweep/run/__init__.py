"""Run a sweep: boards, programs, visits, schedules tried again."""
