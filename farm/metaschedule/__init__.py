"""The farm inside stock MetaSchedule scripts: a builder, a runner and a database that TVM's own `tune_*` take.

Scripts import them from `farm.search`. Searching stays MetaSchedule's; compilers and boards are child processes here.
"""
