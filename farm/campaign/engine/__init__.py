"""Run campaigns on a fleet: the loop around the scheduler, its boards, builds, searches and verification."""
