"""Campaigns: files, plans and orders; `scheduler` decides (pure), `engine` executes, `verify` writes records."""
