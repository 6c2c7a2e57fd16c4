"""A sweep carried out: boards, programs, visits, schedules tried again."""
