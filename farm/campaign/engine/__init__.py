"""Run campaigns on a fleet: the loop around the scheduler, its boards, builds, searches and verification.

`farm.campaign.scheduler` decides what is done next. Here decisions are executed, and their results are written to the
store before anything depends on them.
"""
