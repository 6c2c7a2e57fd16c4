"""A builder, a runner and a database for stock MetaSchedule scripts.

Scripts import them from `farm.search`. Searching stays MetaSchedule's; compilers and boards are child processes here.
"""
