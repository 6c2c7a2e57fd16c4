"""`python -m farm.campaign.engine`: the engine of campaigns as a process. Commands that need it start it.

With `--take-over NAME...` it continues campaigns whose engine was killed, on this host's engine. With `--for-host` it
prepares this machine for a campaign that its starter is about to submit.
"""

from __future__ import annotations

import sys

from farm.campaign.engine import control, process

if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(control.take_over(words[1:]) if words[:1] == ["--take-over"] else process.main(control.FOR_HOST in words))
