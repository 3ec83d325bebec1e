"""Making a draft head for a target: collect its answers, train on them, export. See `specgate train-draft`."""
