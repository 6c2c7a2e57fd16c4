"""Install the agent on a board over SSH, verify, update and remove it; make the bundles that it comes from.

Bundles: `pins`, `wheels`, `agent_wheel`, `interpreters`, `bundle`, `bundle_build`. Boards: `layout` (where things lie),
`service_files`, `survey` (what is there), `plan` (what to do), `scripts` (how), `board` (one), `boards` (several),
`proof`.
"""
