"""Notices: events that operators want to hear of, sent by a command, to a webhook or by Apprise."""
