"""Makes figures readable: plots and Markdown from plain values. Measures nothing and reads no database."""
