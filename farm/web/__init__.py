"""The page of `farm web` and the API under it. Its modules load FastAPI, but for `running`: nothing else of the farm
imports them before a page is wanted.
"""
