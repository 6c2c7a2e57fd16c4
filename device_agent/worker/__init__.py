"""The process that runs one candidate or model, and everything that happens in it."""
