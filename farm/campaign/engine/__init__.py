"""Execute campaigns on a fleet: the loop around the scheduler, its boards, builds, searches and finals.

What is done next is decided in `farm.campaign.scheduler`; here decisions are carried out, and what came of them is
written to the store before anything else rests on it.
"""
