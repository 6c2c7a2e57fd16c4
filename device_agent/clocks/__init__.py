"""Clocks of a board: what they are, holding them at an operating point, and never leaving them there.

`cpufreq`, `hotplug`, `devfreq`, `emc` and `power_mode` know one kind of kernel file each; `controller` holds a point.
`access` says how files are written; `rules`, `guard`, `helper` and `client` are the root clock helper and its client.
"""
