"""Documents: what reports make, `--json` prints and the API serves. They hold facts and do nothing."""
