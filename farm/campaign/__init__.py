"""Campaigns: ordered and planned; what to do next (`scheduler`, pure), doing it (`engine`), winners (`verify`)."""
