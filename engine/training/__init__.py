"""Making a draft head for a target: collect answers, train, export. See `specgate train-draft`."""
