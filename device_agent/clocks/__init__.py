"""A board's clocks: discover them, hold an operating point, restore them.

`bounds`, `cpufreq`, `hotplug`, `devfreq`, `emc` and `power_mode` know one kind of kernel file each; `point` checks a
point, `apply` writes it, `controller` holds it. `access` says how files are written; `rules`, `guard`, `transaction`,
`server`, `helper` and `client` are the root clock helper and its client.
"""
