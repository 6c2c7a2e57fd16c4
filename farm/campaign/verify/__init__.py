"""Turn a campaign's best candidates into records: compare outputs, time rounds, decide, time whole models."""
