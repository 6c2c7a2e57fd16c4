"""The `farm` command: options in, text or JSON out. It decides nothing; each file is one noun."""
