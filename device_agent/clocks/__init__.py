"""A board's clocks: discover them, hold an operating point, restore them.

`bounds`, `cpufreq`, `emc` and `power_mode` each know one kind of kernel file; `apply` plans and writes a point,
`controller` holds it. `access` is the interface for writing files; `rules`, `guard`, `transaction`, `server`, `helper`
and `client` are the root clock helper and its client.
"""
