"""Send notices to the URLs of the library Apprise: chats, mail, telephones.

A module of its own, since loading the library takes a tenth of a second.
"""

from __future__ import annotations

import logging

import apprise

# Its warnings may hold parts of a URL, which are secrets.
logging.getLogger("apprise").setLevel(logging.CRITICAL)


def is_url(url: str) -> bool:
    """Whether Apprise knows what to do with a URL."""
    return apprise.Apprise().add(url)


def notify(url: str, title: str, body: str) -> bool:
    """Send a text to a URL; returns whether its service accepted it."""
    sender = apprise.Apprise()
    sender.add(url)
    return bool(sender.notify(body=body, title=title))
