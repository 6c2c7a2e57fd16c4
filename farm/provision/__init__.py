"""Install the agent on a board over SSH, verify, update and remove it; make the bundles that it comes from.

Bundles: `wheels`, `interpreters`, `bundle`, `bundle_build`. Boards: `layout` (paths), `survey` (what is there), `plan`
(what to do), `scripts` (how), `board` (one), `boards` (several).
"""
