"""The coordinator's long-running part: tracker, ways to boards, probes, metrics, kept up by one process.

`daemon` is that process, `client` how commands find it or start one for themselves; `prober` is the child that talks
TVM's RPC to boards. Work on boards (campaigns, sweeps) lives elsewhere.
"""
