"""The process that runs one candidate or model."""
