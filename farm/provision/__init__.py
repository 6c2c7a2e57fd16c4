"""Put the agent on a board over SSH, prove it, keep it up to date, remove it; and the bundles that it comes from.

Bundles: `pins`, `wheels`, `agent_wheel`, `interpreters`, `bundle`, `bundle_build`. Boards: `layout` (where things lie),
`service_files`, `survey` (what is there), `plan` (what to do), `scripts` (how), `board` (one), `boards` (several),
`proof`.
"""
