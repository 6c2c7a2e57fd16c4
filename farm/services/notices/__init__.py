"""Notices: what operators want to hear of, sent by a command or to a webhook."""
