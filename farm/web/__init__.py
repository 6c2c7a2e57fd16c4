"""The page of `farm web` and its REST API. Its modules load FastAPI, but for `running`: nothing else of the farm
imports them before a page is wanted.
"""
